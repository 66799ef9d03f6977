"""The trained drafter's laws for one tree: trunk passes, then levels read off the last one."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from inference.row_buffer import RowBuffer, token_slots
from inference.tree_builder import Frontier
from jakiro.drafter import JakiroDrafter
from jakiro.experts import BankOutput
from jakiro.masks import slot_mask
from jakiro.mixture import posterior_log_weights
from jakiro.target import TargetAdapter


class TreePass:
    """A `LawSource` for one round.

    Depth d = 1..A runs the trunk on the nodes of depth d - 1 (the root first); depth A + k reads
    parallel level k of pass A, gathered by the query that each surviving node descends from.

    Args:
        model: the trained drafter.
        target: supplies embeddings and logits.
        num_passes: trunk passes A.
        own_rows: self-attention rows; those of expanded nodes are written after the root's slot.
        memory: cross-attention rows; those of verified tokens stand at their positions.
        root: the last emitted token of each sequence.
        lengths: number of verified tokens, which is the position of the root.
        highest: the largest of them, known on the host.
    """

    def __init__(
        self,
        model: JakiroDrafter,
        target: TargetAdapter,
        num_passes: int,
        own_rows: RowBuffer,
        memory: RowBuffer,
        root: Int[Tensor, "batch 1"],
        lengths: Int[Tensor, " batch"],
        highest: int,
    ) -> None:
        self.model = model
        self.target = target
        self.num_passes = num_passes
        self.own_rows = own_rows
        self.memory = memory.prefix(highest)
        self.root = root
        self.lengths = lengths
        self.highest = highest
        self.is_verified = (
            token_slots(0, self.memory.keys.shape[2], 1, root.device) < lengths[:, None]
        )
        self.num_written = 0  # rows from the root's slot on
        self.seen = torch.zeros(len(root), 1, 0, dtype=torch.bool, device=root.device)
        self.ancestor = torch.zeros_like(
            root
        )  # query of the last pass that each node descends from

    def joint(
        self, depth: int, frontier: Frontier | None
    ) -> Float[Tensor, "batch f components vocab"]:
        """Return `log(w_e p_e(t))` of the candidates at `depth` below each node of the frontier."""
        level = depth - self.num_passes
        if level <= 0:
            log_probs = self._predict(depth, frontier)
        else:
            assert frontier is not None
            log_probs = self._read_parallel(level, frontier)
        self.last_joint = log_probs + self.log_weights.float().unsqueeze(-1)
        return self.last_joint

    def _predict(self, depth: int, frontier: Frontier | None) -> Tensor:
        """Return the laws of the next level, by a pass of the trunk."""
        output = self._run_trunk(depth, frontier)
        self.log_weights = output.log_weights
        # Of the last pass all levels at once: the head's weights are read a single time.
        levels = output.features.shape[2] if depth == self.num_passes else 1
        # Contiguous rows: a strided slice would make the projection to logits several times slower.
        features = output.features[:, :, :levels].contiguous()
        self.level_log_probs = self.target.logits(features).float().log_softmax(dim=-1)
        return self.level_log_probs[:, :, 0]

    def _read_parallel(self, level: int, frontier: Frontier) -> Tensor:
        """Return the laws of a parallel level, routed by what each node's path has chosen."""
        origin = frontier.origin
        sequence = torch.arange(len(origin), device=origin.device)[:, None]
        at_token = self.last_joint[sequence, origin, :, frontier.token_ids]
        self.log_weights = posterior_log_weights(at_token, self.log_weights[sequence, origin])
        self.ancestor = origin if level == 1 else self.ancestor[sequence, origin]
        return self.level_log_probs[sequence, self.ancestor, level]

    def _run_trunk(self, depth: int, frontier: Frontier | None) -> BankOutput:
        token_ids = self.root if frontier is None else frontier.token_ids
        count = token_ids.shape[1]
        self._extend_seen(count, frontier)
        base = self.lengths[:, None]
        written = base + torch.arange(self.num_written + count, device=base.device)
        slots = written[:, self.num_written :]
        self.num_written += count
        store = self.own_rows.write_through(slots, self.highest + self.num_written)
        mask = slot_mask(self.lengths, written, self.seen, store.count)
        output: BankOutput = self.model(
            self.target.embed(token_ids).to(self.model.dtype),
            (base + (depth - 1)).expand_as(token_ids),
            mask.unsqueeze(1),
            self.memory,
            self.is_verified[:, None, None].expand(-1, -1, count, -1),
            store,
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
