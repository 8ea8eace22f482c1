"""A run's folder: what a run leaves behind, complete or absent, never half.

    recipe.yaml · metrics.jsonl · samples/step_N.jsonl · samples/eval/step_N.jsonl · checkpoints/step_N/ ·
    adapters/step_N/ · report.html · log.txt

Whatever moment the process is killed at or the disk fills up, the folder can be opened again and holds the last
complete checkpoint with the metrics up to it. Knows nothing about what a checkpoint contains: the caller writes into a
folder.
"""

import contextlib
import fcntl
import json
import logging
import math
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from beam_rl.credentials import hide
from beam_rl.errors import InputError, SaveError
from beam_rl.files import DISK_FULL, disk_error, full, sync_path

LOGGER = logging.getLogger("beam_rl")

# A run may go on with other values of these: they don't change what a step computes.
RESUMABLE = (
    "trainer.steps",
    "trainer.collective_timeout_s",
    "sync.deadline_s",
    "trainer.optimizer.offload",
    "trainer.optimizer.nvme.path",
    "trainer.optimizer.nvme.block_bytes",
    "trainer.optimizer.nvme.moments",
    "trainer.parallel.",
    "trainer.wait_in",
    "trainer.profile.",
    "rollout.profile.",
    "checkpoint.",
    "eval.",
    "logging.",
    "cluster.",
)
MANIFEST = "state.json"
STEP_FOLDER = re.compile(r"step_(\d+)")
STEP_FILE = re.compile(r"step_(\d+)\.jsonl")

Json = dict[str, Any]


class MetricsError(RuntimeError):
    """A metric that is not finite, or a step out of order: the run has failed."""


class RunError(InputError):
    """The run's folder can't be used as asked; one line in the user's words."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    step: int
    score: float | None  # the eval score that `keep_best` compares; None where no eval had run
    state: Json  # what the caller handed over beside the files


class _LogFile(logging.FileHandler):
    """log.txt. What the disk does not take is lost without a word: the writes that count tell of it."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class _Formatter(logging.Formatter):
    """Without the keys and tokens that an error of some library may quote."""

    def format(self, record: logging.LogRecord) -> str:
        return hide(super().format(record))


class Run:
    """One run's folder, held by one process at a time. Make it with `Run.open`, leave it with `close` or `with`."""

    def __init__(
        self, folder: Path, recipe: Json, resumed: Checkpoint | None, set_aside: Path | None, lock: int
    ) -> None:
        self.folder = folder
        self.logs = folder / "logs"  # of engines and actors
        self.recipe = recipe
        self.resumed = resumed  # the checkpoint to load before the first step; None: start from the beginning
        self.set_aside = set_aside  # where a run lies that had no checkpoint to go on from
        self._lock = lock
        # Of a run that was interrupted after an update, the checkpoint's own step has not been reported yet.
        self.last_step = max((line["step"] for line in read_metrics(folder)), default=-1)
        self._metrics = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._handler = _LogFile(folder / "log.txt", encoding="utf-8")
        self._handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        LOGGER.addHandler(self._handler)
        if LOGGER.level == logging.NOTSET:
            LOGGER.setLevel(logging.INFO)  # the root's default would keep everything below a warning out of log.txt
        if set_aside:
            LOGGER.warning("no checkpoint to go on from; the earlier steps are in %s", set_aside)
        LOGGER.info("%s", f"resumed from {resumed.path}" if resumed else "started")

    @classmethod
    def open(cls, folder: Path, recipe: Json, resume: Literal["auto"] | Path | None = None) -> "Run":
        """Opens the folder for a new run, or for going on with the one it holds.

        Args:
            folder: made where missing.
            recipe: resolved, plain data as YAML holds it.
            resume: None starts a new run and refuses a folder that holds one. "auto" goes on from the latest checkpoint,
                or starts anew where there is none: what was reported without one moves to earlier/N. A checkpoint's path
                goes on from it: in its own run, where it must be the latest, or in a new folder, which then gets the
                metrics up to it.
        Raises:
            RunError: the folder holds a run and `resume` is None, a run of another recipe, other files, or a run that
                another process is training; or the checkpoint isn't one.
        """
        recipe = _as_read_back(recipe)  # so that both compare equal
        lock = -1
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = _lock(folder)
            source = _choose(folder, recipe, resume)
            set_aside = _prepare(folder, recipe, source)
            return cls(folder, recipe, source, set_aside, lock)
        except BaseException as error:
            if lock >= 0:
                os.close(lock)
            if isinstance(error, OSError):
                raise RunError(f"can't open {folder}: {error.strerror or error}") from error
            raise

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Closes the folder; what ended the run goes to log.txt first.

        Raises:
            SaveError: the disk is full, whatever write has met it; not where the run has ended of something else before.
        """
        if isinstance(error, KeyboardInterrupt):
            LOGGER.warning("interrupted")
        elif isinstance(error, InputError):
            LOGGER.error("ended: %s", error)
        elif error is not None:
            LOGGER.error("ended", exc_info=error)
            error.add_note(f"(traceback in {self.folder / 'log.txt'})")
        try:
            self.close()
        except OSError as closing:  # the disk refuses what was still to be written
            error = error or closing
        if isinstance(error, OSError) and full(error):
            where = error.filename or f"a file, most likely in {self.folder}"
            raise SaveError(f"can't write {where}: {DISK_FULL}; {self._kept()}") from error
        if error is not None and kind is None:
            raise error

    def close(self) -> None:
        """Lets go of the folder. A second call does nothing."""
        if self._lock < 0:
            return
        lock, self._lock = self._lock, -1
        with contextlib.ExitStack() as stack:  # all of it, also where one fails
            stack.callback(os.close, lock)
            stack.callback(self._metrics.close)
            stack.callback(self._handler.close)
            LOGGER.removeHandler(self._handler)

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends one line to metrics.jsonl: before the step's checkpoint, so that a resume finds it.

        Raises:
            MetricsError: a value that is not finite, or a step that is not after the last one.
        """
        broken = [f"{name} = {value}" for name, value in metrics.items() if not math.isfinite(value)]
        if broken:
            raise MetricsError(f"step {step}: {', '.join(broken)}")
        if step <= self.last_step:
            raise MetricsError(f"metrics of step {step} after those of step {self.last_step}")
        # Numbers may come from numpy or torch, which json doesn't know.
        plain = {name: value if isinstance(value, int) else float(value) for name, value in metrics.items()}
        self._metrics.write(json.dumps({"step": step, **plain}) + "\n")
        self._metrics.flush()
        self.last_step = step

    def log_samples(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Writes samples/step_N.jsonl, one object a sample."""
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_file(self.folder / "samples" / f"step_{step}.jsonl", text)

    def log_evaluation(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Writes samples/eval/step_N.jsonl, one object a held-out prompt."""
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_file(self.folder / "samples" / "eval" / f"step_{step}.jsonl", text)

    def checkpoint(
        self,
        step: int,
        write: Callable[[Path], None],
        state: Json,
        score: float | None = None,
    ) -> Checkpoint:
        """Saves checkpoints/step_N and then removes what `checkpoint.keep_last` and `keep_best` don't keep.

        A step whose checkpoint is complete already is not written again: the same step of a run is the same state.

        Args:
            write: gets an empty folder and fills it; returns when every rank has closed its files.
            state: JSON to get back as `Checkpoint.state`.
            score: the eval score that `keep_best` compares.
        Raises:
            SaveError: the disk is full or failed. The half-written folder is gone, the earlier checkpoints are there.
        """

        def write_all(folder: Path) -> None:
            write(folder)
            files = {str(path.relative_to(folder)): path.stat().st_size for path in _files(folder)}
            if not files:
                raise SaveError(f"the trainer wrote nothing to {folder}: is it on a disk that all ranks share?")
            manifest = {"step": step, "score": score, "state": state, "files": files}
            _sync_tree(folder)  # the manifest vouches for the files: they are on the disk before it
            write_file(folder / MANIFEST, json.dumps(manifest, indent=1, allow_nan=False))

        target = self.folder / "checkpoints" / f"step_{step}"
        existing = read_checkpoint(target)
        if existing is not None:
            return existing
        self._write_folder(target, write_all)
        LOGGER.info("saved %s", target)
        self._prune()
        return Checkpoint(target, step, score, state)

    def adapter(self, step: int, write: Callable[[Path], None]) -> None:
        """Writes adapters/step_N beside the step's checkpoint, with which it is removed later. `write` fills a folder.

        Raises SaveError as `checkpoint` does.
        """
        self._write_folder(self.folder / "adapters" / f"step_{step}", write)

    def checkpoints(self) -> list[Checkpoint]:
        """All complete ones, oldest first."""
        return checkpoints(self.folder)

    def latest(self) -> Checkpoint | None:
        return max(self.checkpoints(), key=lambda c: c.step, default=None)

    def best(self) -> Checkpoint | None:
        """The one with the highest eval score, the later of equals; None where none has a score."""
        return _best(self.checkpoints())

    def _write_folder(self, target: Path, write: Callable[[Path], None]) -> None:
        try:
            write_folder(target, write)
        except Exception as error:
            reason = disk_error(error)
            if reason is None:
                raise
            raise SaveError(f"can't write {target}: {reason}; {self._kept()}") from error

    def _kept(self) -> str:
        last = self.latest()
        return f"the last complete checkpoint is {last.path}" if last else "there is no complete checkpoint yet"

    def _prune(self) -> None:
        settings = self.recipe["checkpoint"]
        complete = self.checkpoints()
        keep = {c.step for c in complete[-settings["keep_last"] :]}
        best = _best(complete) if settings["keep_best"] else None
        for old in complete:
            if old.step in keep or old == best:
                continue
            try:
                remove_folder(self.folder / "adapters" / old.path.name)
                remove_folder(old.path)
            except OSError as error:
                LOGGER.warning("can't remove %s: %s", old.path, error.strerror)


def checkpoints(folder: Path) -> list[Checkpoint]:
    """The complete checkpoints in a run's folder, oldest first."""
    found = (read_checkpoint(path) for path in _steps(folder / "checkpoints", STEP_FOLDER))
    return [checkpoint for checkpoint in found if checkpoint]


def checkpoint_at(path: Path) -> Checkpoint:
    """The checkpoint at `path`, or the last one of the run's folder that `path` is; RunError if there is none."""
    if (path / "recipe.yaml").exists():
        complete = checkpoints(path)
        if not complete:
            raise RunError(f"{path}: this run has no complete checkpoint yet")
        return complete[-1]
    checkpoint = read_checkpoint(path)
    if checkpoint is None or not (path.parents[1] / "recipe.yaml").exists():
        raise RunError(f"{path}: no complete checkpoint there; name runs/<name> or runs/<name>/checkpoints/step_N")
    return checkpoint


def read_checkpoint(path: Path) -> Checkpoint | None:
    """The checkpoint in a folder, or None where it isn't complete: no manifest, a file missing or of another size."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        for name, size in manifest["files"].items():
            if (path / name).stat().st_size != size:
                return None
        return Checkpoint(path, manifest["step"], manifest["score"], manifest["state"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write_folder(target: Path, write: Callable[[Path], None]) -> None:
    """Makes `target` with what `write` puts into it, all of it on the disk, or leaves things as they were."""
    target.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own: what a killed run's ranks still write must not get into the next run's folder.
    temporary = target.parent / f".{target.name}.{secrets.token_hex(4)}.tmp"
    temporary.mkdir()
    try:
        write(temporary)
        _sync_tree(temporary)
        remove_folder(target)
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_path(target.parent)


def remove_folder(path: Path) -> None:
    """Removes a folder so that a kill in between leaves nothing that looks like a checkpoint."""
    if not path.exists():
        return
    doomed = path if path.name.startswith(".") else path.parent / f".{path.name}.removed"
    if doomed != path:
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
    shutil.rmtree(doomed)


def write_file(path: Path, text: str) -> None:
    """Writes a file beside the place and renames it there, on the disk before it has its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.tmp"
    try:
        temporary.write_text(text, encoding="utf-8")
        sync_path(temporary)
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_path(path.parent)


def read_metrics(folder: Path) -> Iterator[Json]:
    """The steps in metrics.jsonl, in order. A last line that was cut off by a kill is left out."""
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return
    for number, line in enumerate(lines, 1):
        try:
            yield json.loads(line)
        except ValueError:
            if number < len(lines):
                raise RunError(f"{folder / 'metrics.jsonl'}: line {number} is not JSON") from None


def saved_steps(samples: Path) -> list[int]:
    """The steps that a folder has a step_N.jsonl of, in order."""
    return [_step_of(path) for path in _steps(samples, STEP_FILE)]


def in_use(folder: Path) -> bool:
    """Whether a process trains in the folder now."""
    try:
        handle = os.open(folder / ".lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(handle)
    return False


def differences(there: Json, here: Json) -> list[str]:
    """Dotted keys with both values where two recipes differ in what a run can't go on with."""
    old, new = flat(there), flat(here)
    return [
        f"{key} ({_shown(old, key)} there, {_shown(new, key)} here)"
        for key in sorted(old.keys() | new.keys())
        if not key.startswith(RESUMABLE) and old.get(key, ...) != new.get(key, ...)
    ]


def check_folder(folder: Path, recipe: Json, resume: Literal["auto"] | Path | None) -> None:
    """Raises the RunError that `Run.open` would, as far as it can be seen without touching the folder."""
    if folder.is_dir():
        _choose(folder, _as_read_back(recipe), resume)


def _as_read_back(recipe: Json) -> Json:
    return yaml.safe_load(yaml.safe_dump(recipe))


def _choose(folder: Path, recipe: Json, resume: Literal["auto"] | Path | None) -> Checkpoint | None:
    """The checkpoint to start from, after every reason to refuse."""
    has_recipe = (folder / "recipe.yaml").exists()
    if not has_recipe and any(not path.name.startswith(".") for path in folder.iterdir()):
        raise RunError(f"{folder} is not empty and holds no run: give --out another folder")
    holds_run = has_recipe and _has_begun(folder)
    if holds_run:
        _require_same(folder, recipe)
        if resume is None:
            raise RunError(f"{folder} holds a run already: continue it with --resume, or give --out another folder")
    if resume is None:
        return None
    complete = checkpoints(folder)
    latest = complete[-1] if complete else None
    if resume == "auto":
        return latest
    return _chosen(folder, recipe, Path(resume), latest, holds_run)


def _has_begun(folder: Path) -> bool:
    """Whether the folder's run must not be overwritten; one of ours that failed before its first step may be."""
    ours = (folder / "log.txt").exists()
    steps = (checkpoints(folder), list(read_metrics(folder)), _steps(folder / "samples", STEP_FILE))
    return any(steps) or not ours


def _chosen(folder: Path, recipe: Json, path: Path, latest: Checkpoint | None, holds_run: bool) -> Checkpoint:
    chosen = read_checkpoint(path)
    if chosen is None:
        raise RunError(f"--resume {path}: no complete checkpoint there")
    source = path.resolve().parent.parent
    if source != folder.resolve():
        if holds_run:
            raise RunError(f"--resume {path}: {folder} holds a run of its own; continue that with --resume auto")
        if (source / "recipe.yaml").exists():
            _require_same(source, {**recipe, "name": _read_recipe(source).get("name")})
    elif latest is not None and latest.step > chosen.step:
        raise RunError(
            f"--resume {path}: {folder} has a newer checkpoint, step_{latest.step}; "
            "give --out another folder to branch off, or remove the newer ones"
        )
    return chosen


def _require_same(folder: Path, recipe: Json) -> None:
    found = differences(_read_recipe(folder), recipe)
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise RunError(
            f"{folder} holds a run of another recipe, which differs in {', '.join(found[:3])}{more}: "
            "give --out another folder, or --resume with the same recipe"
        )


def _prepare(folder: Path, recipe: Json, source: Checkpoint | None) -> Path | None:
    """Brings the folder to the state of the checkpoint: nothing half, nothing of later steps.

    Returns where the steps of a run without checkpoint were moved to, if there were any.
    """
    set_aside = None if source else _set_aside(folder)
    write_file(
        folder / "recipe.yaml",
        yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True),
    )
    for parent in ("checkpoints", "samples"):
        (folder / parent).mkdir(exist_ok=True)
    for parent in ("checkpoints", "samples", "samples/eval", "adapters"):
        for leftover in (folder / parent).glob(".step_*"):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    last = source.step if source else -1
    history = source.path.resolve().parent.parent if source else folder
    kept = [line for line in read_metrics(history) if line["step"] <= last]
    write_file(folder / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in kept))
    for path in (*_steps(folder / "samples", STEP_FILE), *_steps(folder / "samples" / "eval", STEP_FILE)):
        if _step_of(path) > last:
            path.unlink()
    for path in _steps(folder / "adapters", STEP_FOLDER):
        if _step_of(path) > last:
            remove_folder(path)
    return set_aside


def _set_aside(folder: Path) -> Path | None:
    """Moves what a run without checkpoint has reported to earlier/N: it starts anew, and nothing is lost."""
    if not (folder / "recipe.yaml").exists() or not _has_begun(folder):
        return None
    taken = [int(path.name) for path in (folder / "earlier").glob("*") if path.name.isdigit()]
    target = folder / "earlier" / str(max(taken, default=0) + 1)
    target.mkdir(parents=True)
    for name in ("metrics.jsonl", "samples", "adapters"):
        if (folder / name).exists():
            (folder / name).rename(target / name)
    (folder / "samples").mkdir(exist_ok=True)
    return target


def _read_recipe(folder: Path) -> Json:
    try:
        recipe = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise RunError(f"{folder / 'recipe.yaml'} is not YAML: {str(error).splitlines()[0]}") from None
    return recipe if isinstance(recipe, dict) else {}


def flat(tree: Json, prefix: str = "") -> Json:
    """A tree's leaves by their dotted keys."""
    leaves: Json = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return leaves


def _shown(leaves: Json, key: str) -> str:
    return repr(leaves[key]) if key in leaves else "absent"


def _steps(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    paths = [path for path in folder.iterdir() if pattern.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(paths, key=_step_of)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_").removesuffix(".jsonl"))


def _best(complete: Sequence[Checkpoint]) -> Checkpoint | None:
    scored = [(c.score, c.step, c) for c in complete if c.score is not None]
    return max(scored, key=lambda entry: entry[:2])[2] if scored else None


def _lock(folder: Path) -> int:
    """An open file that holds the folder's lock: the system lets go of it when the process ends, however it ends."""
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise RunError(f"another process is training in {folder}: give --out another folder") from None
    except OSError as error:
        LOGGER.warning(
            "%s can't be locked (%s): don't train into it twice at once",
            folder,
            error.strerror,
        )
    return handle


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _sync_tree(folder: Path) -> None:
    for path in _files(folder):
        sync_path(path)
    for path in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
        sync_path(path)
