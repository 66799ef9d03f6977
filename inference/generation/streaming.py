"""Streaming of emitted tokens: as text of whole characters, or as token ids to a streamer."""

import sys
from collections.abc import Callable, Iterator
from types import FrameType

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from inference.engine.decode_step import DecodeStep
from inference.engine.loop import DecodeRun
from inference.generation.incremental_text import IncrementalText
from inference.generation.prompts import needed
from jakiro.errors import PromptError


class TextPrinter(BaseStreamer):
    """A streamer that writes the generated text, without the prompt."""

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
        """Write the rest of the text."""
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
        raise PromptError(
            "a streamer supports only one sequence", expected="one prompt", got=len(run.sequences)
        )
    if not has_prompt:
        streamer.put(torch.tensor([run.token_ids]))
    for steps in run:
        streamer.put(torch.tensor(steps[0].token_ids))
        yield steps
    streamer.end()


def pieces(steps: Iterator[DecodeStep], tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield the text of decoding steps as soon as the text is final."""
    text = IncrementalText(tokenizer)
    for step in steps:
        if piece := "".join(map(text.push, step.token_ids)):
            yield piece
    if rest := text.flush():
        yield rest
