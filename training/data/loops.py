"""Recognition of generated texts that repeat themselves."""

from collections import Counter
from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

NGRAM, MOST_REPEATS = 8, 3  # length of an n-gram, and how often it may occur in a usable text


class InLoop(StoppingCriteria):
    """Ends a text as soon as its last n-gram has occurred too often; such a text is dropped."""

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        """Return whether each text ends in a loop."""
        is_loop = [ends_in_loop(ids) for ids in input_ids]
        return torch.tensor(is_loop, device=input_ids.device)


STOP_LOOPS = StoppingCriteriaList([InLoop()])


def ends_in_loop(token_ids: Int[Tensor, " tokens"]) -> bool:
    """Return whether the last n-gram of a text occurs so often that the text is a loop."""
    if len(token_ids) < NGRAM:
        return False
    is_equal = (token_ids.unfold(0, NGRAM, 1) == token_ids[-NGRAM:]).all(dim=1)
    return int(is_equal.sum()) > MOST_REPEATS


def repeats(token_ids: Sequence[int]) -> bool:
    """Return whether an n-gram of tokens occurs so often that the text is a loop."""
    grams = zip(*(token_ids[start:] for start in range(NGRAM)), strict=False)
    return max(Counter(grams).values(), default=0) > MOST_REPEATS
