"""Builds every distinct rank of some layouts without memory, and looks at what of the checkpoint their parameters are.

A process of its own, since Megatron is told to be many ranks in turn: `python -m tests.plan_coverage` reads a JSON list of
{"config", "parallel"} from stdin and prints for each what is wrong: nothing, where the ranks hold the checkpoint exactly.
"""

import gc
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from beam_rl.checkpoint_shapes import checkpoint_shapes
from beam_rl.plan.model_shapes import Counted, as_rank, build_on_meta
from beam_rl.recipe.tree import Parallel

Box = tuple[int, int, int, int]  # first and last row, first and last column, the last ones not included


def distinct_ranks(parallel: Parallel) -> Iterator[int]:
    """One rank for every part of the model: of each stage, those that differ in tp, ep or etp."""
    stage = parallel.dp * parallel.tp * parallel.cp
    cut = max(parallel.tp, parallel.ep * parallel.etp)  # consecutive ranks differ in tp, and in etp and then ep
    for pp in range(parallel.pp):
        yield from range(pp * stage, pp * stage + cut)


def problems(config: Mapping[str, Any], parallel: Parallel) -> Iterator[str]:
    """Where the ranks' parameters and the checkpoint's tensors are not the same."""
    from transformers import AutoConfig

    plain = dict(config)
    hf = AutoConfig.for_model(plain.pop("model_type"), **plain)
    shapes, boxes = checkpoint_shapes(config), defaultdict(set)
    for rank in distinct_ranks(parallel):
        with as_rank(rank, parallel):
            yield from _look_at(rank, build_on_meta(Counted(config, "bf16", None), parallel), hf, shapes, boxes)
    yield from (f"no rank holds {name}" for name in shapes.keys() - boxes.keys())
    yield from (f"not in the checkpoint: {name}" for name in boxes.keys() - shapes.keys())
    for name in shapes.keys() & boxes.keys():
        held = sum((rows - first) * (columns - left) for first, rows, left, columns in boxes[name])
        if held != math.prod(shapes[name]) or overlap(sorted(boxes[name])):
            yield f"{name}, {shapes[name]}: held are {sorted(boxes[name])}"


def _look_at(rank: int, chunks: Any, hf: Any, shapes: Mapping[str, Any], boxes: Any) -> Iterator[str]:
    """Notes what a rank holds; each parameter must be filled once, by slices that are inside their tensors."""
    from beam_rl.megatron.slices import targets_of

    for target in targets_of(chunks, hf):
        shape = tuple(target.tensor.shape)
        assert target.tensor.is_meta
        into = sorted((part.into, part.into + len(part.rows)) for part in target.slices)
        if [begin for begin, _ in into] != [0, *(end for _, end in into[:-1])] or into[-1][1] != shape[0]:
            yield f"rank {rank}: {target.name} {shape} is filled by rows {into}"
        for part in target.slices:
            whole = shapes.get(part.name, (0,))
            width = math.prod(whole[1:])
            columns = part.columns or range(width)
            if len(columns) != math.prod(shape[1:]) or part.rows.stop > whole[0] or columns.stop > width:
                yield f"rank {rank}: {target.name} {shape} takes {part} of {whole}"
            boxes[part.name].add((part.rows.start, part.rows.stop, columns.start, columns.stop))


def overlap(boxes: Sequence[Box]) -> bool:
    """Whether two of the boxes share an element."""
    return any(
        a[0] < b[1] and b[0] < a[1] and a[2] < b[3] and b[2] < a[3] for i, a in enumerate(boxes) for b in boxes[i + 1 :]
    )


def main() -> None:
    from beam_rl.megatron import compat

    compat.install()
    gc.disable()  # a quarter of the time would go into looking through modules that reference counts free
    found = [list(problems(order["config"], Parallel(**order["parallel"]))) for order in json.load(sys.stdin)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
