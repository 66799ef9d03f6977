"""A small language model's laws for one tree, which it reads level by level."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from inference.tree_builder import Frontier
from jakiro.cache import SlotCache
from jakiro.target import StepInput, TargetAdapter, Written


class LMPass:
    """A `LawSource` for one round; rows of the nodes that it reads take the slots behind the root.

    Args:
        model: the small model.
        cache: its rows, those of the roots included.
        vocab_size: number of tokens that target and model have in common.
        features: of the roots.
        lengths: positions of the roots.
    """

    def __init__(
        self,
        model: TargetAdapter,
        cache: SlotCache,
        vocab_size: int,
        features: Float[Tensor, "batch 1 hidden"],
        lengths: Sequence[int],
    ) -> None:
        self.model = model
        self.cache = cache
        self.vocab_size = vocab_size
        self.features = features
        self.lengths = list(lengths)
        self.num_read = torch.tensor(self.lengths, device=model.device) + 1
        self.token_ids = torch.empty(len(self.lengths), 0, dtype=torch.long, device=model.device)
        self.parents = self.positions = self.token_ids  # of the nodes that were read
        self.seen = torch.zeros(len(self.lengths), 1, 0, dtype=torch.bool, device=model.device)
        self._first = 0  # of the nodes of the last frontier

    def joint(
        self, depth: int, frontier: Frontier | None
    ) -> Float[Tensor, "batch f components vocab"]:
        """Return log-probabilities of the candidates at `depth` below each node of the frontier."""
        features = self.features if frontier is None else self._read(depth, frontier)
        logits = self.model.logits(features)[..., : self.vocab_size]
        return logits.float().log_softmax(dim=-1).unsqueeze(2)

    def accepted(self, row: int, token_ids: Sequence[int]) -> list[int]:
        """Return the slots of the nodes that were read along a path from the root.

        Args:
            row: which sequence.
            token_ids: the path; its end may not have been read.
        """
        place_of = {
            (parent, token): place
            for place, (parent, token) in enumerate(
                zip(self.parents[row].tolist(), self.token_ids[row].tolist(), strict=True)
            )
        }
        slots: list[int] = []
        node = -1
        for token in token_ids:
            if (node := place_of.get((node, token), -1)) < 0:
                break
            slots.append(self.lengths[row] + 1 + node)
        return slots

    def keep(self, places: Sequence[int]) -> None:
        """Forget all sequences but those at these places, for which no more laws are asked."""
        self.lengths = [self.lengths[place] for place in places]
        self.token_ids = self.token_ids[list(places)]
        self.parents = self.parents[list(places)]

    def _read(self, depth: int, frontier: Frontier) -> Float[Tensor, "batch f hidden"]:
        before = self.token_ids.shape[1]
        self._take_in(depth, frontier)
        slots = self.num_read[:, None] + torch.arange(
            self.token_ids.shape[1], device=self.num_read.device
        )
        step = StepInput(
            token_ids=frontier.token_ids,
            positions=self.positions[:, before:],
            slots=slots[:, before:],
            lengths=self.num_read,
            highest_slot=max(self.lengths) + self.token_ids.shape[1],
            written=Written(slots, self.positions, self.seen),
        )
        return self.model.forward(step, self.cache).features

    def _take_in(self, depth: int, frontier: Frontier) -> None:
        """Note the nodes of a frontier: their parents, and that they see these and themselves."""
        count = frontier.token_ids.shape[1]
        own = torch.eye(count, dtype=torch.bool, device=self.seen.device)
        index = frontier.origin[:, :, None].expand(-1, -1, self.seen.shape[2])
        self.seen = torch.cat(
            (self.seen.gather(1, index), own.expand(len(frontier.origin), -1, -1)), dim=2
        )
        # Nodes of the first level descend from the root, which is no node: -1.
        parents = frontier.origin + self._first if depth > 2 else frontier.origin - 1
        self._first = self.token_ids.shape[1]
        # Padding of drawn trees may stand for any position; it is never seen.
        highest = self.model.spec.max_position - 1
        positions = (self.num_read[:, None] + (depth - 2)).clamp(max=highest)
        self.token_ids = torch.cat((self.token_ids, frontier.token_ids), dim=1)
        self.parents = torch.cat((self.parents, parents), dim=1)
        self.positions = torch.cat((self.positions, positions.expand_as(parents)), dim=1)
