"""Streaming of emitted tokens: as text of whole characters, or as token ids to a streamer."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
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


def feed(run: DecodeRun, streamer: BaseStreamer | None) -> Iterator[list[DecodeStep]]:
    """Yield a run's decoding steps, and pass their tokens to a streamer."""
    if streamer is None:
        yield from run
        return
    if len(run.sequences) > 1:
        raise PromptError(
            "a streamer supports only one sequence", expected="one prompt", got=len(run.sequences)
        )
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
