"""The garbage collector is away for large imports alone."""

import gc

import pytest

from beam_rl.imports import uncollected


def test_the_collector_is_off_inside_and_as_it_was_after() -> None:
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), uncollected():
        raise ImportError
    assert gc.isenabled()
