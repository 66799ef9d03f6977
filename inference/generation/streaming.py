"""Streaming of emitted tokens: as text of whole characters, or as token ids to a streamer."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from inference.engine.decode_step import DecodeStep
from inference.engine.loop import DecodeRun
from inference.generation.prompts import needed
from jakiro.errors import PromptError

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # tokenizers decode an incomplete code point to this


class TextStream:
    """The text of a growing sequence, without code points that later tokens may complete.

    Args:
        tokenizer: the target's tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._ids: list[int] = []
        self._num_shown = 0  # number of characters already returned

    def push(self, token_ids: list[int]) -> str:
        """Return the new text that is complete after these tokens; it may be empty."""
        self._ids += token_ids
        text = self._decoded()
        return "" if text.endswith(REPLACEMENT) else self._take(text)

    def flush(self) -> str:
        """Return the rest of the text, incomplete code points included."""
        return self._take(self._decoded())

    def _decoded(self) -> str:
        return str(self.tokenizer.decode(self._ids, skip_special_tokens=True))

    def _take(self, text: str) -> str:
        piece, self._num_shown = text[self._num_shown :], len(text)
        return piece


class TextPrinter(BaseStreamer):
    """A streamer that writes the generated text, without the prompt.

    Args:
        tokenizer: the target's tokenizer.
        write: function that is called with each piece of text.

    Raises:
        PromptError: the tokenizer is None.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, write: Callable[[str], object]
    ) -> None:
        self._stream = TextStream(needed(tokenizer))
        self._write = write
        self._is_prompt = True

    def put(self, value: Tensor) -> None:
        """Skip the prompt's ids in the first call, and write the text of new ids in later calls."""
        if not self._is_prompt:
            self._write(self._stream.push(value.tolist()))
        self._is_prompt = False

    def end(self) -> None:
        """Write the rest of the text."""
        self._write(self._stream.flush())


def feed(run: DecodeRun, streamer: BaseStreamer | None) -> Iterator[list[DecodeStep]]:
    """Yield a run's decoding steps, and pass their tokens to a streamer.

    Args:
        run: run that has not begun yet.
        streamer: streamer of the caller; None to stream nothing.

    Raises:
        PromptError: there is a streamer, and the run has several sequences.
    """
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


def pieces(steps: Iterator[DecodeStep], stream: TextStream) -> Iterator[str]:
    """Yield the text of decoding steps as soon as the text is final.

    Args:
        steps: decoding steps of a single sequence.
        stream: stream that decodes the tokens of the steps.
    """
    for step in steps:
        if piece := stream.push(step.token_ids):
            yield piece
    if rest := stream.flush():
        yield rest
