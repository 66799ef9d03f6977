"""The check that a target computes the same features for a token, whatever is computed with it."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from jakiro.errors import TargetNotSupported
from jakiro.target.adapter import StepInput, TargetAdapter, chain_step

PROMPT, PATH = 16, 6  # numbers of tokens that are read as a prompt, and along a path of a tree


@torch.no_grad()
def check_batch_invariance(target: TargetAdapter) -> None:
    """Compare tokens that are read one by one, together, and in a tree with siblings, bit for bit.

    Args:
        target: adapter of the target, after `make_batch_invariant`.

    Raises:
        TargetNotSupported: the features or logits differ.
    """
    count = min(PROMPT + PATH, target.spec.max_position)
    token_ids = torch.arange(count, device=target.device)[None] % target.spec.vocab_size
    expected = _one_by_one(target, token_ids)
    together = target.forward(chain_step(token_ids, 0), target.new_cache(1, count)).features
    in_tree = _in_tree(target, token_ids)
    for way, got in (("together", together), ("in a tree", in_tree)):
        if not _are_equal(target, expected[:, -got.shape[1] :], got):
            raise TargetNotSupported(
                f"the target computes other features for tokens that are read {way}",
                expected="the bits of tokens that are read one by one",
                got=f"differences in {str(target.dtype).removeprefix('torch.')}",
                remedy="decode without batch_invariant, or with another number of threads",
            )


def _are_equal(target: TargetAdapter, expected: Tensor, got: Tensor) -> bool:
    if not torch.equal(expected, got):
        return False
    single = [target.logits(expected[:, index : index + 1]) for index in range(got.shape[1])]
    return torch.equal(torch.cat(single, dim=1), target.logits(got))


def _one_by_one(
    target: TargetAdapter, token_ids: Int[Tensor, "1 tokens"]
) -> Float[Tensor, "1 tokens hidden"]:
    cache = target.new_cache(1, token_ids.shape[1] + 1)
    steps = [chain_step(token_ids[:, i : i + 1], i) for i in range(token_ids.shape[1])]
    return torch.cat([target.forward(step, cache).features for step in steps], dim=1)


def _in_tree(
    target: TargetAdapter, token_ids: Int[Tensor, "1 tokens"]
) -> Float[Tensor, "1 path hidden"]:
    """Read the first half of the tokens, then the other half as a path in which each has a sibling.

    Nodes 0, 2, 4, ... are the path, and nodes 1, 3, 5, ... are siblings with other tokens.
    """
    start = token_ids.shape[1] // 2
    path = token_ids[:, start:]
    cache = target.new_cache(1, start + 2 * path.shape[1])
    target.forward(chain_step(token_ids[:, :start], 0), cache)
    node = torch.arange(2 * path.shape[1], device=path.device)[None]
    other = (path + 1) % target.spec.vocab_size
    step = StepInput(
        token_ids=torch.stack((path, other), dim=2).flatten(1),
        positions=start + node // 2,
        slots=start + node,
        lengths=torch.tensor([start], device=path.device),
        highest_slot=start + node.shape[1] - 1,
        parents=torch.where(node < 2, -1, 2 * (node // 2) - 2),
        max_depth=path.shape[1],
    )
    return target.forward(step, cache).features[:, ::2]
