"""The tokens in which a chat template wraps what comes between two turns of the model.

What was sampled is never encoded again, so a conversation can't be rendered anew for each turn: the tokens around an
environment's text are found once, by rendering, and checked against a rendering. Takes any Hugging Face tokenizer.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

from beam_rl.errors import InputError

ASKED, SAID, ANSWERED = "Zasked1", "Zsaid2", "Zanswered3"  # texts that no template writes by itself


@dataclass(frozen=True)
class Frame:
    """What follows a turn of the model's, up to where it speaks again."""

    end: list[int]  # token ids that end a turn, the last one a stop token: for one that has none
    before: list[int]
    after: list[int]
    encode: Callable[[str], list[int]]

    def around(self, text: str, ended: bool = True) -> list[int]:
        """ended: the turn ended with its stop token."""
        return [*(() if ended else self.end), *self.before, *self.encode(text), *self.after]


def find_frame(tokenizer: PreTrainedTokenizerBase, role: Literal["user", "tool"], stop_ids: Collection[int]) -> Frame:
    """The frame of the tokenizer's chat template; without one, a text follows as it stands.

    Args:
        role: as whom the environment speaks.
        stop_ids: the tokens that end a turn of the model.
    Raises:
        InputError: a template that can't be framed so.
    """

    def encode(text: str) -> list[int]:  # special tokens that an environment writes are text like other text
        return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])

    if tokenizer.chat_template is None:
        return Frame([], [], [], encode)
    conversation = [
        {"role": "user", "content": ASKED},
        {"role": "assistant", "content": SAID},
        {"role": role, "content": ANSWERED},
    ]
    try:
        shown = str(tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False))
    except Exception as error:  # a template raises what it likes
        raise _refused(role, f"it can't be rendered ({str(error).splitlines()[0]})") from None
    if [shown.count(text) for text in (ASKED, SAID, ANSWERED)] != [1, 1, 1]:
        raise _refused(role, "it does not show each message once, as it is")
    between, after = shown.split(SAID)[1].split(ANSWERED)
    ids = list(tokenizer(between, add_special_tokens=False)["input_ids"])
    stop = next((i for i, token in enumerate(ids) if token in stop_ids), None)
    if stop is None:
        raise _refused(role, "it does not end a message of the assistant's with a token that ends a response")
    frame = Frame(
        ids[: stop + 1], ids[stop + 1 :], list(tokenizer(after, add_special_tokens=False)["input_ids"]), encode
    )
    whole = list(tokenizer(shown, add_special_tokens=False)["input_ids"])
    told = frame.around(ANSWERED)
    if whole[-len(told) :] != told:
        raise _refused(role, "its text around a message is encoded otherwise alone than in a conversation")
    return frame


def _refused(role: str, why: str) -> InputError:
    return InputError(f"environment: the model's chat template can't frame an answer of role {role}: {why}")
