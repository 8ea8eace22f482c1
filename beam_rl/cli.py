"""The commands. Each reads its input, does one thing, and ends with 0 (done), 1 (the run failed) or 2 (wrong input)."""

import json
import sys
import traceback
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
import typer.core

from beam_rl import interrupts
from beam_rl.bench import BENCHES
from beam_rl.credentials import hide
from beam_rl.errors import InputError, SaveError
from beam_rl.files import DISK_FULL, full
from beam_rl.plan import command as plan_command

if TYPE_CHECKING:
    from beam_rl.megatron.settings import ExportForm

LINE = 400  # characters of an unexpected error that a person reads; the traceback has the rest


class Command(typer.core.TyperCommand):
    """A command whose failures are one line on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.Exit:  # a command's own end, which has said all there is to say
            raise
        except KeyboardInterrupt:
            leave(130, "interrupted")
        except Exception as error:
            cause = root_cause(error)
            if isinstance(cause, InputError):
                leave(2, str(cause))
            if isinstance(cause, SaveError):
                leave(1, str(cause))
            if isinstance(cause, OSError) and full(cause):
                leave(1, f"can't write {cause.filename or 'a file'}: {DISK_FULL}")
            where = getattr(error, "__notes__", [])  # a run's log.txt has the traceback already
            if not where:
                typer.echo(hide("".join(traceback.format_exception(error))), err=True)
            line = " ".join(f"{type(cause).__name__}: {cause}".split())
            leave(1, " ".join([line[:LINE], *where]))


app = typer.Typer(
    help="RL post-training for Beam: Megatron trains, vLLM samples, and the two agree on every log-probability.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class Precision(StrEnum):
    fp32 = "fp32"
    bf16 = "bf16"


class SizeName(StrEnum):
    tiny = "tiny"
    small = "small"
    small256 = "small256"


RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe file, such as recipes/tiny_cpu.yaml.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the recipe, such as trainer.steps=10.")
]


@app.command(cls=Command)
def train(
    recipe: RecipeFile,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder.", show_default="runs/<name>")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved recipe, and the plan on stderr; start nothing.")
    ] = False,
    resume: Annotated[
        str | None,
        typer.Option(metavar="[auto|PATH]", help="Go on from the run's last checkpoint, or from the one at PATH."),
    ] = None,
) -> None:
    """Train with RECIPE: metrics, samples and checkpoints go to the run's folder."""
    from beam_rl.recipe.load import dump, load

    resolved = load(recipe, overrides or ())
    if dry_run:
        typer.echo(dump(resolved), nl=False)
        plan_command.show_for(resolved)
        return
    from beam_rl.start import run_training

    interrupts.install(resolved.checkpoint.grace_s)
    try:
        plan_command.refuse_if_too_large(resolved)
        run_training(resolved, out or Path("runs") / resolved.name, resume)
    except interrupts.Interrupted as end:
        lost = f", {end.lost}" if end.lost else ""
        leave(end.exit_code, f"interrupted by {end}{lost}; --resume goes on from the last checkpoint, if there is one")


@app.command(cls=Command)
def eval(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE", help="A recipe file, a run's folder, one of its checkpoints, or an HF model's folder."
        ),
    ],
    overrides: Overrides = None,
    k: Annotated[
        int | None, typer.Option("--k", help="Of pass@k, at most eval.samples_per_prompt, which is the default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Sample an eval set and print the mean score with its 95 % interval, and pass@k.

    Of a run's folder the last checkpoint is evaluated, of a recipe the model it starts from. An HF folder has no recipe:
    give data.eval.path=FILE, and verifier.name or rollout.max_response_tokens where the defaults do not do.

    avg@n is the mean score over all n samples of a prompt (eval.samples_per_prompt); its interval is the mean ± 1.96
    standard errors of the prompts' means, so it holds for other prompts of the kind. pass@k is the unbiased estimate,
    1 − C(n − passed, k) / C(n, k).
    """
    from beam_rl.start import run_evaluation

    result = run_evaluation(source, overrides or (), k)
    if as_json:
        typer.echo(json.dumps(result))
        return
    interval = result["ci95"]
    between = f" (95 % interval over prompts {interval[0]:.1%} to {interval[1]:.1%})" if interval else ""
    typer.echo(
        f"{result['task']}: avg@{result['samples']} {result['avg@k']:.1%}{between}, "
        f"pass@{result['k']} {result['pass@k']:.1%}, {result['prompts']} prompts"
    )


@app.command(cls=Command)
def parity(
    recipe: RecipeFile,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    by_source: Annotated[
        bool, typer.Option("--sources", help="Instead: what the gap of trainer and engine is made of.")
    ] = False,
    other: Annotated[
        list[str] | None, typer.Option(metavar="'KEY=VALUE ...'", help="With --sources: also try this; repeatable.")
    ] = None,
) -> None:
    """Score the same tokens with trainer, engine and transformers, and print where they first depart.

    Ends with 1 if a sub-layer or the log-probabilities exceed the recipe's bounds (`parity.*`).
    """
    from beam_rl.parity.table import show
    from beam_rl.start import run_parity, run_sources

    if by_source:
        from beam_rl.parity import sources

        gaps = run_sources(recipe, overrides or (), other or ())
        if as_json:
            typer.echo(json.dumps(sources.record(gaps)))
        else:
            sources.show(gaps)
        return
    if other:
        raise InputError("--other: goes with --sources")

    comparison = run_parity(recipe, overrides or ())
    if as_json:
        typer.echo(json.dumps(comparison.record()))
    else:
        show(comparison)
    if not comparison.within_bounds:
        raise typer.Exit(1)


@app.command(cls=Command)
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="The run's folder; several are compared.")],
    out: Annotated[
        Path | None,
        typer.Option(help="The page.", show_default="RUN/report.html, of several: compare.html in the first"),
    ] = None,
) -> None:
    """Write one HTML page: curves with intervals, parity, where the time went, samples. It asks nothing of the network.

    A run writes its own page too, at each evaluation and checkpoint.
    """
    from beam_rl.report.page import write_page

    typer.echo(f"written to {write_page(runs, out)}")


@app.command(cls=Command)
def export(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="runs/<name>/checkpoints/step_N, or runs/<name> for the last.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; must not exist.")],
    adapter: Annotated[bool, typer.Option("--adapter", help="The adapter, for PEFT and vLLM.")] = False,
    merged: Annotated[bool, typer.Option("--merged", help="All weights, with what the adapter adds.")] = False,
    full: Annotated[bool, typer.Option("--full", help="All weights of a run without an adapter.")] = False,
    mxfp8: Annotated[bool, typer.Option("--mxfp8", help="The same quantized, of a run in MXFP8, for vLLM.")] = False,
) -> None:
    """Write a checkpoint as an HF folder that transformers and vLLM load: the adapter, where the run trains one."""
    from beam_rl.start import run_export

    forms: tuple[tuple[ExportForm, bool], ...] = (
        ("adapter", adapter),
        ("merged", merged),
        ("full", full),
        ("mxfp8", mxfp8),
    )
    asked = [form for form, wanted in forms if wanted]
    if len(asked) > 1:
        raise InputError(f"--{asked[0]} and --{asked[1]}: name one form")
    run_export(checkpoint, out, asked[0] if asked else None)
    typer.echo(f"written to {out}")


@app.command(cls=Command)
def tiny(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; must not exist.")],
    seed: Annotated[int, typer.Option(min=0, help="Decides every bit of the checkpoint.")] = 0,
    precision: Annotated[Precision, typer.Option(help="The router is FP32 in both.")] = Precision.fp32,
    size: Annotated[
        SizeName, typer.Option(help="small, small256: 0.6 and 0.9 billion parameters; a GPU makes them.")
    ] = SizeName.tiny,
) -> None:
    """Write a small Beam checkpoint with tokenizer and data, warm-started on an arithmetic task (tiny: about a minute)."""
    from beam_rl.report import Console
    from beam_rl.tiny.sizes import SIZES
    from beam_rl.tiny.write import write_tiny

    if out.exists():
        raise InputError(f"{out}: exists already; name a new folder")
    made = SIZES[size.value]
    with Console(0, file=sys.stderr) as console, console.phase("warm start", made.schedule.steps, once=True) as phase:
        try:
            report = write_tiny(out, seed, lambda step, steps, loss: phase.advance(), dtype=precision.value, size=made)
        except ValueError as e:
            raise InputError(str(e)) from None
    typer.echo(f"written to {out}: {report.summary}")


@app.command(cls=Command)
def plan(
    recipe: RecipeFile,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    suggest: Annotated[bool, typer.Option("--suggest", help="Also search for layouts that fit.")] = False,
    simulate: Annotated[bool, typer.Option("--simulate", help="Also simulate the three paces.")] = False,
    lengths: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Response lengths of this run's samples, instead of made-up ones."),
    ] = None,
    bench: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A result of `bench sync` or `bench nvme` --json; repeatable."),
    ] = None,
) -> None:
    """Say what RECIPE needs of its machines (`cluster.gpu`, or this one), in bytes and seconds, before anything starts.

    Ends with 1 if it does not fit; each problem names the key to turn.
    """
    if not plan_command.run(recipe, overrides or (), as_json, suggest, simulate, lengths, bench or ()):
        raise typer.Exit(1)


@app.command(cls=Command)
def doctor(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="[RECIPE]", help="Also look at what this recipe would use.")
    ] = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Look at this machine: packages, GPUs, memory, disks, and with RECIPE its model, NVMe, Ray and hub.

    Ends with 1 if something would keep a run from starting.
    """
    from beam_rl.doctor import examine
    from beam_rl.recipe.load import load
    from beam_rl.report.checkup import show

    checks = examine(load(recipe, overrides or ()) if recipe else None)
    healthy = all(check.status != "fail" for check in checks)
    if as_json:
        typer.echo(json.dumps({"ok": healthy, "checks": [vars(check) for check in checks]}))
    else:
        show(checks)
    if not healthy:
        raise typer.Exit(1)


bench = typer.Typer(help="Measure a part beside what this machine allows.", no_args_is_help=True, rich_markup_mode=None)
for _name, _bench in BENCHES.items():
    bench.command(_name, cls=Command)(_bench)
app.add_typer(bench, name="bench")


def main() -> None:
    """The entry point of `beam-rl`."""
    interrupts.install()
    sys.argv[1:] = explicit_resume(sys.argv[1:])
    app()


def root_cause(error: BaseException) -> BaseException:
    """The exception a Ray actor raised, without Ray's wrapping; any other as it is."""
    cause: Any = getattr(error, "cause", None)
    return root_cause(cause) if isinstance(cause, BaseException) else error


def explicit_resume(arguments: list[str]) -> list[str]:
    """Spells out `--resume` without a value as `--resume auto`."""
    spelled = list(arguments)
    for i in range(len(spelled) - 1, -1, -1):
        following = spelled[i + 1] if i + 1 < len(spelled) else "-"
        if spelled[i] == "--resume" and (following.startswith("-") or "=" in following or following.endswith(".yaml")):
            spelled.insert(i + 1, "auto")
    return spelled


def leave(code: int, message: str) -> NoReturn:
    """Ends the process with one line on stderr."""
    typer.echo(f"beam-rl: {hide(message)}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
