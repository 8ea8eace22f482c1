"""Turns a data set into prompts, and deals them out in an endless, seeded order that one integer resumes.

Promises that a prompt is encoded exactly once (no second <bos>) and that what is left out is counted. Takes any
Hugging Face tokenizer; knows nothing about Ray, vLLM or Megatron.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from beam_rl.data.rows import DataError, Row, read_rows
from beam_rl.recipe.tree import DataSource
from beam_rl.samples import Prompt

Messages = list[dict[str, Any]]


@dataclass
class Counts:
    """What became of the rows."""

    rows: int = 0  # read
    no_prompt: int = 0
    no_answer: int = 0
    duplicates: int = 0  # the same prompt and answer as an earlier row
    too_long: int = 0  # more than `max_prompt_tokens`

    def __str__(self) -> str:
        left_out = {
            "without a prompt": self.no_prompt,
            "without an answer": self.no_answer,
            "duplicates": self.duplicates,
            "too long": self.too_long,
        }
        named = ", ".join(f"{count} {why}" for why, count in left_out.items() if count)
        return f"{self.rows} rows" + (f", left out: {named}" if named else "")


@dataclass
class _Columns:
    """The recipe's two columns, and whether any row had them."""

    key: str
    prompt: str
    answer: str
    seen: set[str] = field(default_factory=set)
    last: Row = field(default_factory=dict)

    def read(self, row: Row) -> tuple[Any, Any]:
        self.last = row
        return self._reach(row, self.prompt, "prompt"), self._reach(row, self.answer, "answer")

    def _reach(self, row: Row, name: str, role: str) -> Any:
        """A column, or with dots a field of a struct; None where the row lacks it."""
        value: Any = row
        for part in [name] if name in row else name.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return None
            value = value[part]
        self.seen.add(role)
        return value

    def check_seen(self) -> None:
        for role, name in (("prompt", self.prompt), ("answer", self.answer)):
            if role not in self.seen:
                there = ", ".join(_names(self.last))
                raise DataError(f"{self.key}.{role}: no column {name!r}; there are: {there}")


def _names(row: Row, prefix: str = "") -> list[str]:
    """Column names, structs as the dotted names of their fields."""
    names: list[str] = []
    for name, value in row.items():
        names += _names(value, f"{prefix}{name}.") if isinstance(value, Mapping) and value else [prefix + name]
    return names


def read_prompts(
    source: DataSource,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
    key: str,
    keep_rows: bool = False,
) -> tuple[list[Prompt], Counts]:
    """Every usable row of a data set as a prompt; positions count the prompts that are kept.

    Left out and counted: rows without a prompt or an answer, exact duplicates (DAPO-Math-17K holds each of its
    problems a hundred times), and prompts longer than `max_prompt_tokens`.

    Args:
        keep_rows: whether a prompt keeps its row, with `prompt` and `answer` as they were read, whatever their columns;
            rows that differ anywhere are then no duplicates.
    Raises:
        DataError: the data can't be read, a column is missing, or no row is left.
    """
    counts, columns = Counts(), _Columns(key, source.prompt, source.answer)
    prompts: list[Prompt] = []
    known: set[bytes] = set()
    for index, row in enumerate(read_rows(source, key)):
        counts.rows += 1
        raw_prompt, raw_answer = columns.read(row)
        prompt, answer = as_messages(raw_prompt, key, index), as_answer(raw_answer, key, index)
        if not prompt or answer is None:
            counts.no_prompt += not prompt
            counts.no_answer += bool(prompt)
            continue
        kept = dict(row) | {"prompt": prompt, "answer": answer} if keep_rows else None
        known_by = json.dumps(kept or [prompt, answer], default=str)
        digest = hashlib.blake2b(known_by.encode(), digest_size=16).digest()
        if digest in known:
            counts.duplicates += 1
            continue
        known.add(digest)
        ids = encode(prompt, tokenizer, key)
        if len(ids) > max_prompt_tokens:
            counts.too_long += 1
            continue
        prompts.append(Prompt(len(prompts), index, ids, answer, kept))
    if counts.rows:
        columns.check_seen()
    if not prompts:
        raise DataError(_nothing_left(source, key, counts, max_prompt_tokens))
    return prompts, counts


def _nothing_left(source: DataSource, key: str, counts: Counts, max_prompt_tokens: int) -> str:
    if not counts.rows:
        return f"{key}.path: {source.path} has no rows"
    return (
        f"{key}.path: none of the {counts.rows} rows of {source.path} can be used: {counts.no_prompt} have no prompt, "
        f"{counts.no_answer} no answer, {counts.too_long} more than data.max_prompt_tokens = {max_prompt_tokens} tokens"
    )


def as_messages(value: Any, key: str, row: int) -> str | Messages:
    """A prompt as the row holds it, a text or chat messages; empty where there is nothing to say."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value if value.strip() else ""
    if isinstance(value, list) and all(isinstance(m, Mapping) and m.get("role") for m in value):
        # Columnar files fill the fields that a message lacks with None; a template must not see those.
        messages = [{name: part for name, part in message.items() if part is not None} for message in value]
        return messages if any(str(message.get("content", "")).strip() for message in messages) else ""
    raise DataError(f"{key}.prompt: row {row}: a text or a list of chat messages with a role is expected")


def as_answer(value: Any, key: str, row: int) -> str | None:
    """The gold answer as text; None where there is none."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if value is None or isinstance(value, str):
        return value.strip() or None if value else None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise DataError(f"{key}.answer: row {row}: a text or a number is expected, not {type(value).__name__}")


def encode(prompt: str | Messages, tokenizer: PreTrainedTokenizerBase, key: str) -> list[int]:
    """The prompt's token ids, ready for the response to follow.

    With a chat template the template alone places the special tokens; a text becomes one user message. Without one a
    text is encoded as it stands, with the special tokens that the tokenizer adds by itself.
    """
    if tokenizer.chat_template is None:
        if not isinstance(prompt, str):
            raise DataError(
                f"{key}.prompt: the rows hold chat messages, but the model's tokenizer has no chat template"
            )
        return list(tokenizer(prompt)["input_ids"])
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False))


class PromptStream:
    """An endless order of prompts: each epoch is a permutation that only the seed and the epoch's number decide.

    Its whole state is one integer, the position of the next prompt.
    """

    def __init__(self, prompts: Iterable[Prompt], seed: int, counts: Counts | None = None) -> None:
        self._prompts = list(prompts)
        if not self._prompts:
            raise ValueError("a prompt stream needs at least one prompt")
        self.counts = counts or Counts(rows=len(self._prompts))
        self._seed = seed
        self._position = 0
        self._epoch = -1
        self._order: NDArray[np.int64] = np.empty(0, np.int64)

    @classmethod
    def open(
        cls,
        source: DataSource,
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_tokens: int,
        seed: int,
        key: str = "data.train",
        keep_rows: bool = False,
    ) -> "PromptStream":
        """The stream over a data set; arguments and errors as in `read_prompts`."""
        prompts, counts = read_prompts(source, tokenizer, max_prompt_tokens, key, keep_rows)
        return cls(prompts, seed, counts)

    def __len__(self) -> int:
        """Prompts in one epoch."""
        return len(self._prompts)

    def take(self, n: int) -> list[Prompt]:
        """The next `n` prompts; after an epoch's last one comes the next epoch's first."""
        taken = [self.at(position) for position in range(self._position, self._position + n)]
        self._position += n
        return taken

    def state(self) -> int:
        """What `restore` needs to go on from here."""
        return self._position

    def restore(self, state: int) -> None:
        """Goes on with the prompt at position `state`."""
        self._position = state

    def at(self, position: int) -> Prompt:
        """The prompt at a position of the endless order."""
        epoch, index = divmod(position, len(self._prompts))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng([self._seed, epoch]).permutation(len(self._prompts))
        return replace(self._prompts[self._order[index]], position=position)
