"""Every layout against one process: prints the tables of docs/layouts.md and docs/lora.md, or writes them there.

    python -m tests.layout_table [--write]

Each row is a run of as many processes as the layout has ranks. Exits 1 if a number is beyond the bound.
"""

import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
warnings.filterwarnings("ignore")

import lora_tiny  # noqa: E402
from megatron_layouts import (  # noqa: E402
    Layout,
    Parallel,
    errors,
    measure,
    read_checkpoint,
    run,
    same_bits,
)

BOUND = 1e-5
DOCS = Path(__file__).parent.parent / "docs"
START, END = "<!-- table: python -m tests.layout_table --write -->", "<!-- end of the table -->"
ONE = Layout("1", distributed=False)
LAYOUTS = [
    Layout("DP2", Parallel(dp=2), distributed=False),
    Layout("DP2, distributed optimizer", Parallel(dp=2)),
    Layout("TP2+SP", Parallel(tp=2, sp=True)),
    Layout("TP2+SP, ETP2", Parallel(tp=2, sp=True, etp=2)),
    Layout("TP2+SP, EP2", Parallel(tp=2, sp=True, ep=2)),
    Layout("DP2, EP2", Parallel(dp=2, ep=2)),
    Layout("DP2, ETP2", Parallel(dp=2, etp=2)),
    Layout("PP2 even", Parallel(pp=2)),
    Layout("PP2 uneven (2+5)", Parallel(pp=2, pp_layers=[2, 5])),
    Layout("PP2, 2 virtual stages", Parallel(pp=2, vpp=2)),
    Layout("PP2, full recompute", Parallel(pp=2), recompute="full"),
    Layout("PP2, 2 virtual stages, selective recompute", Parallel(pp=2, vpp=2), recompute="selective"),
    Layout("CP2", Parallel(cp=2)),
    Layout("CP2, full recompute", Parallel(cp=2), recompute="full"),
    Layout("TP2+SP × DP2, EP2", Parallel(tp=2, sp=True, dp=2, ep=2)),
    Layout("TP2+SP × DP2, EP4", Parallel(tp=2, sp=True, dp=2, ep=4)),
    Layout("TP2+SP × DP2, EP2, ETP2", Parallel(tp=2, sp=True, dp=2, ep=2, etp=2)),
    Layout("PP2 × DP2, EP2", Parallel(pp=2, dp=2, ep=2)),
    Layout("PP2 × TP2+SP, EP2, 2 virtual stages, full recompute", Parallel(pp=2, vpp=2, tp=2, sp=True, ep=2), "full"),
    Layout("PP2 × DP2, EP2, 2 virtual stages", Parallel(pp=2, vpp=2, dp=2, ep=2)),
    Layout("PP4 uneven (1+1+2+3)", Parallel(pp=4, pp_layers=[1, 1, 2, 3])),
    Layout("CP2 × TP2+SP, EP2", Parallel(cp=2, tp=2, sp=True, ep=2)),
    Layout("CP2 × DP2, EP4", Parallel(cp=2, dp=2, ep=4)),
    Layout("CP2 × PP2", Parallel(cp=2, pp=2)),
    Layout("CP4", Parallel(cp=4)),
]
WITH_ADAPTER = {  # of which docs/lora.md has a table
    "DP2, distributed optimizer",
    "TP2+SP",
    "TP2+SP, ETP2",
    "TP2+SP, EP2",
    "DP2, EP2",
    "DP2, ETP2",
    "PP2 uneven (2+5)",
    "PP2, 2 virtual stages",
    "PP2, full recompute",
    "CP2",
    "TP2+SP × DP2, EP2, ETP2",
    "PP2 × TP2+SP, EP2, 2 virtual stages, full recompute",
}


def rows(
    layouts: list[Layout], folder: Path, process: Layout = ONE
) -> Iterator[tuple[Layout, dict[str, float], dict[str, bool]]]:
    """Each layout's largest errors against one `process`, and what must be the same bits: see docs/layouts.md."""
    alone = process.trainer(0, "127.0.0.1:0")
    one = measure(alone, folder / process.name)
    before = read_checkpoint(folder / process.name)
    for size in sorted({layout.parallel.ranks for layout in layouts}):
        group = [layout for layout in layouts if layout.parallel.ranks == size]
        for layout, seen in run(group, folder, folder / process.name):
            again = read_checkpoint(folder / f"{layout.name}, again")
            alone.load(folder / layout.name)
            alone.save(folder / f"{layout.name}, in one process")
            theirs, ours = (read_checkpoint(folder / f"{layout.name}{end}") for end in ("", ", in one process"))
            bits = {
                "export": same_bits(seen.start, one.start),
                "resume": same_bits(seen.resumed[1], seen.weights) and seen.resumed[0] == seen.metrics[1],
                "checkpoint here": all(again[name].equal(before[name]) for name in before),
                "checkpoint there": all(ours[name].equal(theirs[name]) for name in theirs),
            }
            yield layout, errors(seen, one), bits


def table(found: list[tuple[Layout, dict[str, float], dict[str, bool]]]) -> str:
    heads = ["layout", *(name.replace("gradient: ", "∇ ") for name in found[0][1]), *found[0][2]]
    lines = ["| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|"]
    for layout, values, bits in found:
        cells = [layout.name, *(f"{v:.0e}" if v else "0" for v in values.values())]
        lines.append("| " + " | ".join([*cells, *("same" if same else "DIFFER" for same in bits.values())]) + " |")
    return "\n".join(lines)


def main(write: bool) -> int:
    fine = True
    for page, make in (("layouts.md", of_weights), ("lora.md", of_adapter)):
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            found = list(make(Path(folder)))
        text = table(found)
        print(text)
        worst = max(max(values.values()) for _, values, _ in found)
        fine = fine and worst <= BOUND and all(all(bits.values()) for _, _, bits in found)
        print(f"\n{page}: worst {worst:.1e}, bound {BOUND:.0e}; {time.perf_counter() - started:.0f} s", file=sys.stderr)
        if write:
            whole = (DOCS / page).read_text()
            head, tail = whole.split(START)[0], whole.split(END)[1]
            (DOCS / page).write_text(f"{head}{START}\n{text}\n{END}{tail}")
    return 0 if fine else 1


def of_weights(folder: Path) -> Iterator[tuple[Layout, dict[str, float], dict[str, bool]]]:
    return rows(LAYOUTS, folder)


def of_adapter(folder: Path) -> Iterator[tuple[Layout, dict[str, float], dict[str, bool]]]:
    shape = lora_tiny.adapter()
    given = {"adapter": shape, "adapter_folder": str(lora_tiny.folder(folder / "adapter", shape))}
    chosen = [replace(layout, **given) for layout in LAYOUTS if layout.name in WITH_ADAPTER]
    return rows(chosen, folder, replace(ONE, **given))


if __name__ == "__main__":
    sys.exit(main("--write" in sys.argv[1:]))
