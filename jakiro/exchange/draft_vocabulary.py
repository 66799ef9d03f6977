"""The head of a drafter of EAGLE-3, and the tokens that its rows stand for."""

import torch
from torch import Tensor

from jakiro.exchange.table import TensorTable


def take_head(table: TensorTable, hidden: int, vocab: int, stated: object) -> int | None:
    """Add the head and the draft vocabulary, and return its size; None if it has all tokens.

    Args:
        table: table of the import.
        hidden: width of the drafter.
        vocab: number of tokens of the target.
        stated: size of the draft vocabulary in the config; None if it has none.

    Raises:
        CheckpointError: a tensor is missing, or has another shape, or the tokens are not different
            ones of the target.
    """
    count = table.matrix("lm_head.weight")[0]
    if stated not in (None, count):
        raise table.unusable(f"a head for the draft_vocab_size {stated}", f"one for {count} tokens")
    if table.has("d2t"):
        return _take_drafted(table, hidden, vocab, count)
    if count != vocab:
        raise table.unusable("d2t, or a head for all tokens", f"a head for {count} tokens")
    table.take("own_head.weight", {"lm_head.weight": (count, hidden)})
    if table.has("t2d"):
        table.drop("t2d", "all tokens can be drafted")
    return None


def _take_drafted(table: TensorTable, hidden: int, vocab: int, count: int) -> int | None:
    """Add the head and the draft vocabulary of a drafter that names the tokens of its head."""
    ids = torch.arange(count) + table.read("d2t", (count,))
    order = ids.argsort()
    _check_ids(table, ids, vocab)
    is_sorted = bool((order == torch.arange(count)).all())
    how = "unchanged" if is_sorted else "rows in the order of their tokens"
    shape = {"lm_head.weight": (count, hidden)}
    table.take("own_head.weight", shape, how, lambda parts: parts[0][order])
    if count == vocab:
        table.drop("d2t", "all tokens can be drafted")
        return None

    def as_ids(parts: list[Tensor]) -> Tensor:
        return (torch.arange(count) + parts[0]).sort().values

    how = "offsets added to the row numbers, sorted"
    table.take_ids("draft_ids", "d2t", (count,), how, as_ids)
    return count


def _check_ids(table: TensorTable, ids: Tensor, vocab: int) -> None:
    """Raise an error unless d2t gives different tokens, the same ones as t2d."""
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise table.unusable(
            f"d2t with tokens from 0 to {vocab - 1}", f"{int(ids.min())} to {int(ids.max())}"
        )
    if len(ids.unique()) < len(ids):
        raise table.unusable("d2t with different tokens", "the same token twice")
    if not table.has("t2d"):
        return
    stated = table.read("t2d", (vocab,)).bool()
    is_drafted = torch.zeros_like(stated)
    is_drafted[ids] = True
    if not torch.equal(stated, is_drafted):
        raise table.unusable("t2d with the tokens of d2t", "other tokens")
    table.drop("t2d", "d2t has the same tokens")
