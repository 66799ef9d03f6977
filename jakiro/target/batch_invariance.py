"""Check that a token's features do not depend on the other tokens of a target's forward pass."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from jakiro.errors import TargetNotSupported
from jakiro.target.adapter import TargetAdapter
from jakiro.target.independent_rows import DoubleLinear, has_experts
from jakiro.target.step import StepInput, chain_step
from jakiro.target.weights import PackedLinear

PREFIX, PATH = 70, 6  # numbers of tokens that are read before a path, and along the path
ROWS = (2, 3, 9, 16, 17, 33, 64, 65, 128, 200, 512)  # numbers of rows that layers are compared for
ROWS_OF_HEAD = 128  # largest number of rows that the output embeddings are compared for
ROWS_OF_EXPERTS = 64  # largest number of rows that experts are compared for


class _Product(NamedTuple):
    """A function of rows of numbers that is applied to each row separately."""

    of: Callable[[Tensor], Tensor]
    width: int
    dtype: torch.dtype
    largest: int  # largest number of rows to compare


@torch.no_grad()
def check_batch_invariance(target: TargetAdapter) -> None:
    """Compare matrix products and features, bit for bit, for different numbers of tokens in a step.

    Linear layers and experts of each shape are compared for different numbers of rows. The tokens
    of a path are read one by one, together with the tokens before them, in a tree with siblings,
    and beside another sequence.
    """
    for name, product in _kinds_of_products(target):
        for count in ROWS:
            if count <= product.largest and _differs(product, count):
                raise _not_invariant(target, f"products of {name} with {count} rows")
    for way, features in _ways_to_read(target).items():
        if not torch.equal(*features):
            raise _not_invariant(target, f"features of tokens that are read {way}")


def _kinds_of_products(target: TargetAdapter) -> Iterator[tuple[str, _Product]]:
    seen = set()
    for part, largest in (
        (target.modules.layers, max(ROWS)),
        (target.modules.output, ROWS_OF_HEAD),
    ):
        for name, module in part.named_modules():
            product = _product_of(module, largest)
            outputs = getattr(module, "out_features", None)
            if product is not None and (type(module), product.width, outputs) not in seen:
                seen.add((type(module), product.width, outputs))
                yield name or "the output embeddings", product


def _product_of(module: nn.Module, largest: int) -> _Product | None:
    """Return the products of a part of a target; None if it is neither a layer nor experts."""
    part: Any = module
    if isinstance(part, PackedLinear | DoubleLinear):
        return _Product(part, part.in_features, part.dtype, largest)
    if isinstance(part, nn.Linear | Conv1D):
        width = part.weight.shape[0 if isinstance(part, Conv1D) else 1]
        return _Product(partial(_multiply, part), width, part.weight.dtype, largest)
    if has_experts(part) and hasattr(part, "hidden_dim"):
        dtype = next(part.parameters()).dtype
        return _Product(partial(_through_experts, part), part.hidden_dim, dtype, ROWS_OF_EXPERTS)
    return None


def _multiply(layer: Any, rows: Tensor) -> Tensor:
    product = layer(rows)
    return product if isinstance(product, Tensor) else linear(rows, layer.weight)  # of a router


def _through_experts(module: Any, rows: Tensor) -> Tensor:
    """Return the output of two experts of each row, which the row itself determines."""
    scores, chosen = rows[:, : module.num_experts].topk(min(2, module.num_experts))
    output: Tensor = module(rows, chosen, scores.float().softmax(dim=-1).to(rows.dtype))
    return output


def _differs(product: _Product, count: int) -> bool:
    generator = torch.Generator().manual_seed(count)
    rows = torch.randn(2 * count, product.width, generator=generator).to(product.dtype)
    whole = product.of(rows)
    halves = torch.cat([product.of(rows[:count]), product.of(rows[count:])])
    pair = product.of(rows[:2])
    return not (torch.equal(halves, whole) and torch.equal(pair, whole[:2]))


def _ways_to_read(target: TargetAdapter) -> dict[str, tuple[Tensor, Tensor]]:
    """Return pairs of tensors that must be equal, by the way in which the tokens are read."""
    path = min(PATH, target.spec.max_position // 2)
    prefix = min(PREFIX, target.spec.max_position - path)
    token_ids = torch.arange(prefix + path, device=target.device)[None] % target.spec.vocab_size
    others = (token_ids + 1) % target.spec.vocab_size
    single = _read_one_by_one(target, token_ids, prefix)
    logits = [target.logits(single[:, index : index + 1]) for index in range(path)]
    two_sequences = _read_together(target, torch.cat((token_ids, others)))
    return {
        "together": (single, _read_together(target, token_ids)[:, -path:]),
        "in a tree": (single, _read_in_tree(target, token_ids, others, prefix)),
        "beside another sequence": (single, two_sequences[:1, -path:]),
        "one by one, with their logits": (torch.cat(logits, dim=1), target.logits(single)),
    }


def _read_one_by_one(
    target: TargetAdapter, token_ids: Int[Tensor, "1 tokens"], prefix: int
) -> Float[Tensor, "1 path hidden"]:
    cache = target.new_cache(1, token_ids.shape[1] + 1)
    target.forward(chain_step(token_ids[:, :prefix], 0), cache)
    steps = [
        chain_step(token_ids[:, position : position + 1], position)
        for position in range(prefix, token_ids.shape[1])
    ]
    return torch.cat([target.forward(step, cache).features for step in steps], dim=1)


def _read_together(
    target: TargetAdapter, token_ids: Int[Tensor, "batch tokens"]
) -> Float[Tensor, "batch tokens hidden"]:
    cache = target.new_cache(*token_ids.shape)
    return target.forward(chain_step(token_ids, 0), cache).features


def _read_in_tree(
    target: TargetAdapter,
    token_ids: Int[Tensor, "1 tokens"],
    others: Int[Tensor, "1 tokens"],
    prefix: int,
) -> Float[Tensor, "1 path hidden"]:
    """Read a prefix, then the other tokens as a path in which each has a sibling.

    Nodes 0, 2, 4, ... are the path, and nodes 1, 3, 5, ... are siblings with other tokens.
    """
    length = token_ids.shape[1] - prefix
    cache = target.new_cache(1, prefix + 2 * length)
    target.forward(chain_step(token_ids[:, :prefix], 0), cache)
    node = torch.arange(2 * length, device=token_ids.device)[None]
    step = StepInput(
        token_ids=torch.stack((token_ids, others), dim=2)[:, prefix:].flatten(1),
        positions=prefix + node // 2,
        slots=prefix + node,
        lengths=torch.tensor([prefix], device=token_ids.device),
        highest_slot=prefix + node.shape[1] - 1,
        parents=torch.where(node < 2, -1, 2 * (node // 2) - 2),
        max_depth=length,
    )
    return target.forward(step, cache).features[:, ::2]


def _not_invariant(target: TargetAdapter, what: str) -> TargetNotSupported:
    return TargetNotSupported(
        "the target is not batch-invariant on this machine",
        expected="the same bits, whatever is computed together",
        got=f"different {what}, in {str(target.dtype).removeprefix('torch.')}",
        remedy="decode without batch_invariant, or with another number of threads",
    )
