"""Text pieces from token ids as they become certain, cut at whole code points."""

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what an incomplete code point decodes to


class TextStream:
    """Decodes a growing sequence and hands out what is certain.

    Args:
        tokenizer: of the target.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._ids: list[int] = []
        self._num_shown = 0  # characters already handed out

    def push(self, token_ids: list[int]) -> str:
        """Return the text that the new tokens complete; it may be empty."""
        self._ids += token_ids
        text = self._decoded()
        return "" if text.endswith(REPLACEMENT) else self._take(text)

    def flush(self) -> str:
        """Return what is left at the end, incomplete code points included."""
        return self._take(self._decoded())

    def _decoded(self) -> str:
        return str(self.tokenizer.decode(self._ids, skip_special_tokens=True))

    def _take(self, text: str) -> str:
        piece, self._num_shown = text[self._num_shown :], len(text)
        return piece
