"""The trained drafter's laws for one tree: trunk passes, then levels read off the last one."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from inference.row_buffer import RowBuffer
from inference.tree_builder import Frontier
from jakiro.drafter import JakiroDrafter
from jakiro.experts import BankOutput
from jakiro.masks import slot_mask
from jakiro.mixture import joint_log_probs, posterior_log_weights
from jakiro.target import TargetAdapter
from moa.rows import Rows


class TreePass:
    """A `LawSource` for one round.

    Depth d = 1..A runs the trunk on the nodes of depth d - 1 (the root first); depth A + k reads
    parallel level k of pass A, gathered by the query that each surviving node descends from.

    Args:
        model: the trained drafter.
        target: supplies embeddings and logits.
        num_passes: trunk passes A.
        own_rows: self-attention rows; those of expanded nodes are written after the root's slot.
        memory: cross-attention rows of all verified tokens.
        root: the last emitted token; its position is the number of memory rows.
    """

    def __init__(
        self,
        model: JakiroDrafter,
        target: TargetAdapter,
        num_passes: int,
        own_rows: RowBuffer,
        memory: Rows,
        root: Int[Tensor, "batch 1"],
    ) -> None:
        self.model = model
        self.target = target
        self.num_passes = num_passes
        self.own_rows = own_rows
        self.memory = memory
        self.root = root
        self.length = memory.keys.shape[2]
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
        level = depth - self.num_passes
        if level <= 0:
            self.output = self._run_trunk(depth, frontier)
            self.log_weights = self.output.log_weights
            features = self.output.features[:, :, 0]
        else:
            assert frontier is not None
            features = self._read_parallel(level, frontier)
        # Contiguous rows: a strided slice would make the projection to logits several times slower.
        logits = self.target.logits(features.contiguous())
        self.last_joint = joint_log_probs(logits, self.log_weights)
        return self.last_joint

    def _read_parallel(self, level: int, frontier: Frontier) -> Tensor:
        """Return the features of a parallel level, routed by what each node's path has chosen."""
        assert self.output is not None
        assert self.last_joint is not None
        origin = frontier.origin
        sequence = torch.arange(len(origin), device=origin.device)[:, None]
        at_token = self.last_joint[sequence, origin, :, frontier.token_ids]
        self.log_weights = posterior_log_weights(at_token, self.log_weights[sequence, origin])
        self.ancestor = origin if level == 1 else self.ancestor[sequence, origin]
        features: Tensor = self.output.features[sequence, self.ancestor, level]
        return features

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
        output: BankOutput = self.model(
            self.target.embed(token_ids).to(self.model.dtype),
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
