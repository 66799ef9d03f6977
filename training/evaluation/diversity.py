"""Diversity of the experts: the overlap of their predictions, and the entropy of the router."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from jakiro.experts import ExpertsOutput
from training.distributed.processes import Processes
from training.loss.batch import Batch

TOP = 4  # number of each expert's most likely tokens that are compared
_CHUNK = 2048  # largest number of expert distributions that are in memory at once

Logits = Callable[[Tensor], Tensor]


class Diversity:
    """Sums, over drafted positions, of the experts' overlap and of the router's entropy.

    Args:
        num_components: number of separate distributions: with `combine: mixture`, one for each
            active expert.
    """

    def __init__(self, processes: Processes, num_experts: int, num_components: int) -> None:
        self._processes = processes
        self._num_components = num_components
        self._have_pairs = num_components > 1
        self._sums = torch.zeros(3 + num_experts, dtype=torch.float64, device=processes.device)

    @torch.no_grad()
    def add(
        self, output: ExpertsOutput, selected: Bool[Tensor, "batch sequence"], logits: Logits
    ) -> None:
        """Add the selected positions of one of the drafter's outputs to the sums."""
        gate = output.gate[selected].double()
        overlap = gate.new_zeros(())
        if self._have_pairs:
            features = output.features[:, :, 0][selected]
            for part in features.split(max(1, _CHUNK // self._num_components)):
                overlap = overlap + top_overlap(logits(part)).double().sum()
        count = torch.full_like(overlap, len(gate))
        self._sums += torch.cat([torch.stack([count, overlap, entropy(gate).sum()]), gate.sum(0)])

    def read(self) -> dict[str, Any]:
        """Return means over positions; all processes must call this method.

        `top_overlap` is the fraction of the 4 most likely tokens that two experts have in common,
        averaged over pairs of experts.
        `router_entropy` is the mean entropy of the gates, in nats. It measures how uncertain the
        router is at a position. `load_entropy` is the entropy of the mean gate, in nats. It
        measures how evenly the router loads the experts. `top_overlap` is
        None if the experts have no separate distributions, or if there is only one expert.
        """
        count, overlap, entropies, *load = self._processes.sum(self._sums.clone()).tolist()
        positions = max(count, 1.0)
        mean_gate = [total / positions for total in load]
        return {
            "top_overlap": overlap / positions if self._have_pairs else None,
            "router_entropy": entropies / positions,
            "load_entropy": float(entropy(torch.tensor(mean_gate, dtype=torch.float64))),
            "mean_gate": mean_gate,
            "positions": int(count),
        }


def drafted(batch: Batch) -> Iterator[Bool[Tensor, "batch sequence"]]:
    """Yield a mask of the drafted positions (those with a loss) for each anchor sample."""
    index = torch.arange(batch.token_ids.shape[1], device=batch.token_ids.device)
    for sample in range(batch.anchors.shape[1]):
        yield batch.targets_exist(1) & (index > batch.anchors[:, sample])


def top_overlap(logits: Float[Tensor, "n experts vocab"]) -> Float[Tensor, " n"]:
    """Return the share of their most likely tokens that two experts have in common.

    The share is averaged over all pairs of experts.
    """
    best = logits.topk(min(TOP, logits.shape[-1]), dim=-1).indices
    count, size = best.shape[1:]
    first, second = torch.triu_indices(count, count, offset=1, device=best.device)
    common = (best[:, first, :, None] == best[:, second, None, :]).flatten(2).sum(dim=-1)
    return common.float().mean(dim=1) / size


def entropy(probs: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch"]:
    """Return the entropy of each distribution, in nats."""
    return torch.special.entr(probs).sum(dim=-1)
