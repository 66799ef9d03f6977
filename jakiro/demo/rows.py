"""Rows of a token stream in a shuffled order that follows from the seed alone."""

import torch
from jaxtyping import Int
from torch import Tensor

from jakiro.errors import DataError


class ShuffledRows:
    """Batches for any step, without a state: a resumed run asks for its step and goes on.

    Each epoch cuts the stream at another offset and visits its rows in another order.

    Args:
        token_ids: the stream.
        row_tokens: tokens that a row predicts; it holds one more, as each predicts the next.
        rows_per_step: rows in a batch.
        seed: determines offsets and orders.

    Raises:
        DataError: the stream is shorter than one batch.
    """

    def __init__(
        self, token_ids: Int[Tensor, " stream"], *, row_tokens: int, rows_per_step: int, seed: int
    ) -> None:
        # One row fewer than fits, so that every offset leaves room for all rows.
        self._num_rows = (len(token_ids) - 1) // row_tokens - 1
        if self._num_rows < rows_per_step:
            raise DataError(
                "too few tokens to train on",
                expected=f"at least {(rows_per_step + 2) * row_tokens}",
                got=len(token_ids),
                remedy="use smaller batches, shorter rows, or more text",
            )
        self._token_ids = token_ids
        self._row_tokens = row_tokens
        self._rows_per_step = rows_per_step
        self._seed = seed

    def batch(self, step: int) -> Int[Tensor, "rows row_tokens_and_next"]:
        """Return the rows of one step, counted from zero."""
        epoch, place = divmod(step, self._num_rows // self._rows_per_step)
        generator = torch.Generator().manual_seed(self._seed + 1_000_003 * epoch)
        offset = torch.randint(self._row_tokens, (), generator=generator)
        order = torch.randperm(self._num_rows, generator=generator)
        rows = order[place * self._rows_per_step : (place + 1) * self._rows_per_step]
        within = torch.arange(self._row_tokens + 1)
        return self._token_ids[offset + rows[:, None] * self._row_tokens + within]


def spread_rows(
    token_ids: Int[Tensor, " stream"], *, row_tokens: int, max_rows: int
) -> Int[Tensor, "rows row_tokens_and_next"]:
    """Return at most `max_rows` rows, evenly spread over the stream."""
    num_rows = (len(token_ids) - 1) // row_tokens
    chosen = torch.linspace(0, num_rows - 1, min(max_rows, num_rows)).long()
    return token_ids[chosen[:, None] * row_tokens + torch.arange(row_tokens + 1)]
