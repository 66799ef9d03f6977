"""Responses among the tokens of a tokenizer that does not say where in the text its tokens stand.

Where a text goes on, the tokens of what came before mostly stay: their number is the place of what
comes next. Where they do not, a token lies across a border, and nothing tells which one it is.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from training.data.intake import RowError
from training.data.rendering import Rendered


def gives_offsets(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a tokenizer says where in a text its tokens stand."""
    return bool(getattr(tokenizer, "is_fast", False))


def encode_by_prefixes(
    tokenizer: PreTrainedTokenizerBase, chat: Rendered, place: str
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """Return the tokens of a conversation, and which of them are of responses.

    Args:
        tokenizer: any; every border of a response is encoded by itself.
        chat: the text with its responses.
        place: of the row, for messages.

    Raises:
        RowError: a token lies across the border of a response.
    """
    borders = [border for span in chat.responses for border in span]
    texts = [chat.text, *(chat.text[:border] for border in borders)]
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    ids, *prefixes = encoded
    places = [_length(prefix, ids, tokenizer, place) for prefix in prefixes]
    is_response = np.zeros(len(ids), np.bool_)
    for begin, end in zip(places[::2], places[1::2], strict=True):
        is_response[begin:end] = True
    return np.array(ids, np.int32), is_response


def _length(
    prefix: Sequence[int], ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, place: str
) -> int:
    if list(ids[: len(prefix)]) == list(prefix):
        return len(prefix)
    raise RowError(
        f"cannot tell which tokens of {place} are of responses",
        expected="a tokenizer that says where its tokens stand, or that never joins the end of a "
        "turn with what follows",
        got=f"{type(tokenizer).__name__}, which does neither",
        remedy="put the tokenizer.json of its fast version beside the target, or give rows as "
        "input_ids with loss_mask; data.skip_bad_rows leaves such rows out",
    )
