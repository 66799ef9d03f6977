"""The trained drafter's laws for one tree: trunk passes, then levels read off the last one."""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from inference.row_buffer import RowBuffer
from inference.tree_builder import Frontier
from jakiro.experts import BankOutput
from jakiro.masks import slot_mask
from jakiro.mixture import joint_log_probs
from moa.rows import Rows

if TYPE_CHECKING:
    from inference.drafters.trained import TrainedDrafter


class TreePass:
    """A `LawSource` for one round.

    Depth d = 1..A runs the trunk on the nodes of depth d - 1 (the root first); depth A + k reads
    parallel level k of pass A, gathered by the query that each surviving node descends from.

    Args:
        drafter: weights, target and shape.
        own_rows: self-attention rows; expanded nodes are written after the root's slot.
        memory: cross-attention rows of all verified tokens.
        root: the last emitted token.
        length: position of the root.
    """

    def __init__(
        self,
        drafter: "TrainedDrafter",
        own_rows: RowBuffer,
        memory: Rows,
        root: Int[Tensor, "batch 1"],
        length: int,
    ) -> None:
        self.drafter = drafter
        self.own_rows = own_rows
        self.memory = memory
        self.root = root
        self.length = length
        self.num_written = 0  # rows from the root's slot on
        self.seen = torch.zeros(len(root), 1, 0, dtype=torch.bool, device=root.device)
        self.output: BankOutput | None = None
        self.ancestor = torch.zeros_like(
            root
        )  # query of the last pass that each node descends from

    def joint(
        self, depth: int, frontier: Frontier | None
    ) -> Float[Tensor, "batch f components vocab"]:
        """Return `log(w_e p_e(t))` of the candidates at `depth` below each node of the frontier."""
        level = depth - self.drafter.shape.autoregressive_levels
        if level <= 0:
            self.output = self._run_trunk(depth, frontier)
            features, log_weights = self.output.features[:, :, 0], self.output.log_weights
        else:
            assert self.output is not None
            assert frontier is not None
            self.ancestor = (
                frontier.origin if level == 1 else self.ancestor.gather(1, frontier.origin)
            )
            at_level = self.output.features[:, :, level]
            index = self.ancestor[:, :, None, None].expand(-1, -1, *at_level.shape[2:])
            features, log_weights = at_level.gather(1, index), frontier.log_weights
        return joint_log_probs(self.drafter.target.logits(features), log_weights)

    def _run_trunk(self, depth: int, frontier: Frontier | None) -> BankOutput:
        token_ids = self.root if frontier is None else frontier.token_ids
        batch, count = token_ids.shape
        slots = torch.arange(count, device=token_ids.device) + (self.length + self.num_written)
        slots = slots.expand(batch, -1)
        self._extend_seen(count, frontier)
        self.num_written += count
        written = torch.arange(self.num_written, device=token_ids.device) + self.length
        lengths = torch.full((batch,), self.length, device=token_ids.device)
        visible = self.length + self.num_written
        mask = slot_mask(lengths, written.expand(batch, -1), self.seen, visible)
        memory_mask = mask.new_ones(batch, 1, count, self.length)
        output: BankOutput = self.drafter.model(
            self.drafter.embed(token_ids),
            torch.full_like(token_ids, self.length + depth - 1),
            mask.unsqueeze(1),
            self.memory,
            memory_mask,
            self.own_rows.write_through(slots, visible),
        )
        return output

    def _extend_seen(self, count: int, frontier: Frontier | None) -> None:
        """Let each new query see what its parent saw, and itself."""
        own = torch.eye(count, dtype=torch.bool, device=self.root.device)
        own = own.expand(len(self.root), -1, -1)
        if frontier is None:
            self.seen = own
            return
        index = frontier.origin[:, :, None].expand(-1, -1, self.seen.shape[2])
        self.seen = torch.cat((self.seen.gather(1, index), own), dim=2)
