"""Text of a growing sequence that ends before the first stop string."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from inference.engine.request import StopRule
from jakiro.utils.token_text import REPLACEMENT, text_of_tokens

_LONGEST_WINDOW = 32  # number of tokens after which the beginning of the window may be dropped
_LONGEST_CHARACTER = 3  # number of bytes of a character that its last byte completes
_LONGEST_LINK = 8  # number of tokens, one of which at least should be a character


class IncrementalText:
    """The text of tokens that are pushed one by one, without any character of a stop string.

    Characters that may be the beginning of a stop string, and code points that later tokens may
    complete, are held back. The text ends before the first stop string that is complete. Only the
    last tokens are decoded, so the cost of a token does not grow with the length of the text.

    Args:
        before: tokens that the text continues, such as a prompt; empty if it begins a text of its
            own. Some tokenizers leave out a space at the beginning of a text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stops: Sequence[str] = (),
        *,
        before: Sequence[int] = (),
    ) -> None:
        self.is_stopped = False  # whether a stop string is complete
        self.offset = 0  # number of characters before the last token
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._window: list[int] = []  # the last tokens
        self._num_decoded = 0  # number of characters of the window's text that were taken
        self._boundary = 0  # number of tokens of the window after which its text was complete
        self._held = ""  # characters that may belong to a stop string
        self._num_returned = 0
        self._continue(before)

    @property
    def length(self) -> int:
        """The number of known characters, including those that are held back."""
        return self._num_returned + len(self._held)

    @property
    def is_holding(self) -> bool:
        """Whether characters or parts of characters are held back."""
        return bool(self._held) or self._is_incomplete

    @property
    def _is_incomplete(self) -> bool:
        return self._boundary < len(self._window)

    def push(self, token_id: int) -> str:
        """Return the text that is final after this token; it may be empty."""
        if self.is_stopped:
            return ""
        was_incomplete, self.offset = self._is_incomplete, self.length
        self._window.append(token_id)
        text = self._decoded(self._window)
        complete = text.rstrip(REPLACEMENT)
        is_invalid = len(self._window) - self._boundary > _LONGEST_WINDOW
        if is_invalid:  # only the last bytes can still become a character
            complete = max(complete, text[:-_LONGEST_CHARACTER], key=len)
        piece = complete[self._num_decoded :]
        if complete == text == complete[: self._num_decoded] and text:
            # Some tokenizers leave out a space at the beginning of a text, so that a window must
            # not begin with tokens without text, such as special ones.
            self._window.pop()
            return ""
        self._num_decoded = max(self._num_decoded, len(complete))
        if complete == text:
            self._shorten_window()
        elif is_invalid:
            num_left = len(text) - len(complete)
            self._window, self._boundary = self._window[-_LONGEST_LINK:], 0
            self._num_decoded = len(self._decoded(self._window)) - num_left
        final = self._released(piece)
        if was_incomplete and not (self._is_incomplete or self.is_stopped):
            # The bytes before this token may be characters of their own, which are not valid.
            character = self._decoded([token_id])
            if REPLACEMENT not in character:
                self.offset = max(self.offset, self.length - len(character))
        return final

    def flush(self) -> str:
        """Return the rest of the text, incomplete code points included."""
        if self.is_stopped:
            return ""
        piece = self._decoded(self._window)[self._num_decoded :]
        self._num_decoded += len(piece)
        text = self._released(piece)
        if not self.is_stopped:
            text += self._held
            self._num_returned += len(self._held)
            self._held = ""
        self._boundary = len(self._window)
        return text

    def _continue(self, before: Sequence[int]) -> None:
        """Begin the window with as few of these tokens as have a text of whole characters."""
        for count in range(1, min(len(before), _LONGEST_LINK) + 1):
            window = list(before[-count:])
            text = self._decoded(window)
            if text and not text.endswith(REPLACEMENT):
                self._window, self._num_decoded, self._boundary = window, len(text), count
                return

    def _decoded(self, token_ids: list[int]) -> str:
        return text_of_tokens(self._tokenizer, token_ids)

    def _shorten_window(self) -> None:
        """Drop tokens before the last but one boundary of characters, if there are many tokens."""
        if len(self._window) > _LONGEST_WINDOW and self._boundary:
            self._window = self._window[self._boundary :]
            self._num_decoded = len(self._decoded(self._window))
        self._boundary = len(self._window)

    def _released(self, piece: str) -> str:
        """Add characters to those that are held back, and return those that are final."""
        text = self._held + piece
        starts = [start for stop in self._stops if (start := text.find(stop)) >= 0]
        if starts:
            self.is_stopped, self._held = True, ""
            final = text[: min(starts)]
        else:
            num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
            final, self._held = text[: len(text) - num_held], text[len(text) - num_held :]
        self._num_returned += len(final)
        return final


class TextStopRule(StopRule):
    """A stop rule that also ends a sequence at the first stop string in its text.

    Args:
        text: text to which this rule, and nothing else, pushes the new tokens.
    """

    def __init__(self, rule: StopRule, text: IncrementalText) -> None:
        super().__init__(rule.others, rule.device)
        self.max_length, self.eos_ids, self.deadline = rule.max_length, rule.eos_ids, rule.deadline
        self._text = text

    def __call__(self, token_ids: list[int]) -> bool:
        """Return whether the sequence is complete; must be called once for each new token."""
        self._text.push(token_ids[-1])
        return self._text.is_stopped or super().__call__(token_ids)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of a text with which a stop string begins."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
