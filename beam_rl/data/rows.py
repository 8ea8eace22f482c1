"""Reads the rows of a data set: a .jsonl or .parquet file, or a split on the Hugging Face hub.

Local files are streamed: no copy in a cache, no network, no guessing of types (an answer "2024-01-01" stays text).
Raises `DataError` with one line that names the recipe's key. Knows nothing about prompts or tokenizers.
"""

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from beam_rl.errors import InputError
from beam_rl.recipe.tree import DataSource

Row = Mapping[str, Any]


class DataError(InputError):
    """The data can't be used as the recipe asks; the message is one line that begins with the recipe's key."""


def read_rows(source: DataSource, key: str) -> Iterator[Row]:
    """The data set's rows in their order, at most `source.limit` of them (0: all).

    Args:
        key: where `source` stands in the recipe, such as `data.train`; errors begin with it.
    """
    path = Path(source.path).expanduser()
    if path.suffix == ".jsonl":
        rows = _jsonl_rows(path, key)
    elif path.suffix == ".parquet":
        rows = _parquet_rows(path, key)
    elif path.exists() or path.suffix in (".json", ".csv", ".gz") or source.path.startswith(("/", ".", "~")):
        raise DataError(f"{key}.path: {source.path}: a .jsonl or .parquet file, or a data set on the hub, is expected")
    else:
        rows = _hub_rows(source, key)
    return islice(rows, source.limit or None)


def _existing(path: Path, key: str) -> Path:
    if not path.is_file():
        raise DataError(f"{key}.path: no such file: {path}")
    return path


def _jsonl_rows(path: Path, key: str) -> Iterator[Row]:
    with _existing(path, key).open(encoding="utf-8") as file:
        try:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise DataError(f"{key}.path: {path}, line {number}: a JSON object is expected")
                yield row
        except json.JSONDecodeError as error:
            raise DataError(f"{key}.path: {path}, line {number}: not JSON ({error.msg})") from None
        except UnicodeDecodeError:
            raise DataError(f"{key}.path: {path}: not UTF-8 text") from None


def _parquet_rows(path: Path, key: str) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(_existing(path, key)) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{key}.path: {path}: not a Parquet file ({_first_line(error)})") from None


def _hub_rows(source: DataSource, key: str) -> Iterator[Row]:
    import datasets  # takes seconds, and only the hub needs it

    try:
        rows = datasets.load_dataset(source.path, source.config, split=source.split)
    except ValueError as error:
        if "split" not in str(error).lower():
            raise DataError(f"{key}.path: {source.path}: {_first_line(error)}") from None
        raise DataError(f"{key}.split: {source.path} has no split {source.split!r} ({_first_line(error)})") from None
    except Exception as error:  # no network, no such data set, no permission: each library layer has its own types
        raise DataError(
            f"{key}.path: can't load {source.path!r} from the Hugging Face hub, and no such file is here "
            f"({_first_line(error)})"
        ) from None
    yield from rows


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
