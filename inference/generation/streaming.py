"""Streaming of emitted tokens: as text of whole characters, or as token ids to a streamer.

In a terminal, colors show where each token came from: a draft, by its depth, or the target itself,
whose tokens have no color.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import NamedTuple

import torch
from rich.text import Text
from torch import Tensor
from transformers import GenerationMixin, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from inference.engine.decode_step import DecodeStep
from inference.engine.loop import DecodeRun
from inference.generation.incremental_text import IncrementalText
from inference.generation.prompts import needed
from jakiro.errors import PromptError


class TextPrinter(BaseStreamer):
    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, write: Callable[[str], object]
    ) -> None:
        self._text = IncrementalText(needed(tokenizer))
        self._write = write
        self._is_prompt = True

    def put(self, value: Tensor) -> None:
        """Skip the prompt's ids in the first call, and write the text of new ids in later calls."""
        if not self._is_prompt:
            self._write("".join(map(self._text.push, value.tolist())))
        self._is_prompt = False

    def end(self) -> None:
        self._write(self._text.flush())


def streamer_of_generate() -> BaseStreamer | None:
    """Return the `streamer` argument of the `generate()` of transformers that is running, if any.

    `generate()` passes the prompt to its streamer, but not the streamer to a custom method.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is GenerationMixin.generate.__wrapped__.__code__:  # type: ignore[attr-defined]
            streamer: BaseStreamer | None = frame.f_locals["streamer"]
            return streamer
        frame = frame.f_back
    return None


def feed(
    run: DecodeRun, streamer: BaseStreamer | None, *, has_prompt: bool = False
) -> Iterator[list[DecodeStep]]:
    """Yield a run's decoding steps, and pass their tokens to a streamer, after those of the prompt.

    Args:
        has_prompt: whether the streamer has received the prompt.
    """
    if streamer is None:
        yield from run
        return
    if len(run.sequences) > 1:
        raise PromptError("a streamer supports only one sequence")
    if not has_prompt:
        streamer.put(torch.tensor([run.token_ids]))
    for steps in run:
        streamer.put(torch.tensor(steps[0].token_ids))
        yield steps
    streamer.end()


class TextPiece(NamedTuple):
    """Text of one or several tokens, with the depth of the last one in its draft tree.

    The depth is 0 if the token came from the target itself.
    """

    text: str
    depth: int


_STYLES = ("", "green", "cyan", "magenta", "yellow", "blue")
DEEPEST_COLOR = len(_STYLES) - 1  # deeper drafts have the same color


def pieces_by_depth(
    tokens: Iterable[tuple[int, int]], tokenizer: PreTrainedTokenizerBase
) -> Iterator[TextPiece]:
    """Yield the text of tokens in pieces of whole characters, each with its depth."""
    growing, depth = IncrementalText(tokenizer), 0
    for token, depth in tokens:
        if text := growing.push(token):
            yield TextPiece(text, depth)
    if rest := growing.flush():
        yield TextPiece(rest, depth)


def terminal_style(depth: int) -> str:
    """Return the style for tokens of a depth, in the syntax of the library `rich`."""
    return _STYLES[min(depth, DEEPEST_COLOR)]


def terminal_legend(depths: Iterable[int]) -> Text:
    legend = Text("tokens from: the target itself")
    for index, depth in enumerate(sorted({min(depth, DEEPEST_COLOR) for depth in depths} - {0})):
        legend.append(", " if index else "; drafts at depth ")
        label = f"{depth} or deeper" if depth == DEEPEST_COLOR else str(depth)
        legend.append(label, style=terminal_style(depth))
    return legend
