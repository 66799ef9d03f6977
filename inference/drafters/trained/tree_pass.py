"""The trained drafter's passes over one tree, and the parallel levels of the last pass."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from inference.drafters.trained.kv import DrafterCache, TreeTrunkInputs
from inference.trees.builder import TreeLevel
from jakiro.draft_head import DraftHead
from jakiro.experts import ExpertsOutput, mean_over_components, posterior_log_weights
from jakiro.levels import PseudoRows, with_features
from jakiro.target.cache import SlotCache
from jakiro.target.step import positions_in_slots, slot_mask
from jakiro.target.tail import TargetTail


class TreePass:
    """A `JointPredictor` for one tree.

    Each trunk pass reads the expanded nodes of one depth, beginning with the root, and predicts the
    candidates of the next depth. The last pass also predicts the parallel levels. For candidates
    below nodes that no pass reads, the prediction at their ancestor in the last pass is used.
    """

    def __init__(
        self,
        cache: DrafterCache,
        head: DraftHead,
        num_passes: int,
        most_expanded: int,
        root: Int[Tensor, "batch 1"],
        lengths: Int[Tensor, " batch"],
        highest: int,
        start: int | None = None,
    ) -> None:
        self.cache = cache
        self.head = head
        self.draft_ids = head.token_ids
        self.num_passes = num_passes
        self.root = root
        self.lengths = lengths
        self.highest = highest
        self.inputs = TreeTrunkInputs(cache.model, cache.kept, cache.tokens, lengths, highest)
        self.output: ExpertsOutput | None = None
        self.start = start
        self.num_visible = cache.num_visible(highest + most_expanded)
        self.positions: list[Tensor] = []  # positions of the expanded nodes, pass by pass
        self.mask: Tensor | None = None  # slots that the queries of the last pass attend to
        # for each expanded node, the index of its ancestor among the queries of the last pass
        self.ancestor = torch.zeros_like(root)

    def joint(
        self, depth: int, frontier: TreeLevel | None
    ) -> Float[Tensor, "batch f components drafted"]:
        """Return `log(w_e p_e(t))` of the candidates at `depth` below each node of the frontier.

        Here p_e is the draft distribution of expert e, and w_e is the weight of this expert.
        """
        level = depth - self.num_passes
        if level <= 0:
            log_probs = self._predict(depth, frontier)
        else:
            assert frontier is not None
            log_probs = self._read_parallel(level, frontier)
        if log_probs.shape[2] > 1:
            log_probs = log_probs + self.log_weights.float().unsqueeze(-1)
        self.last_joint = log_probs
        return log_probs

    def _predict(self, depth: int, frontier: TreeLevel | None) -> Tensor:
        """Return the log-probabilities of the next level from a pass of the trunk."""
        output = self.output = self._run_drafter(depth, frontier)
        self.log_weights = output.log_weights
        if self.cache.model.knows_path or depth < self.num_passes:
            token_ids = self.root if frontier is None else frontier.token_ids
            return self._log_probs(output.features[:, :, 0], token_ids)
        # The last pass predicts all its levels at once, so that the head's weights are read from
        # memory only once.
        self.level_log_probs = self.head.log_probs(output.features)
        return self.level_log_probs[:, :, 0]

    def _read_parallel(self, level: int, frontier: TreeLevel) -> Tensor:
        """Return the log-probabilities of a parallel level, and update the experts' weights."""
        origin = frontier.origin
        sequence = torch.arange(len(origin), device=origin.device)[:, None]
        if self.last_joint.shape[2] > 1:
            at_token = self.last_joint[sequence, origin, :, frontier.columns]
            self.log_weights = posterior_log_weights(at_token, self.log_weights[sequence, origin])
        self.ancestor = origin if level == 1 else self.ancestor[sequence, origin]
        if not self.cache.model.knows_path:
            return self.level_log_probs[sequence, self.ancestor, level]
        return self._log_probs(self._below(level, frontier), frontier.token_ids)

    def _below(self, level: int, frontier: TreeLevel) -> Float[Tensor, "batch f components hidden"]:
        """Return the features of a parallel level below the nodes of the frontier."""
        model, output = self.cache.model, self.output
        assert output is not None
        sequence = torch.arange(len(frontier.origin), device=frontier.origin.device)[:, None]
        vectors = output.features if output.waiting is None else output.waiting
        vectors = vectors[sequence, self.ancestor, level]
        path = model.path_features
        if path is None:
            return vectors
        embeddings = self.head.target.embed(frontier.token_ids).to(model.dtype)
        if not path.is_recurrent:
            return vectors + path(embeddings, level).unsqueeze(2)
        weights = output.log_weights[sequence, self.ancestor]
        drafted_from = mean_over_components(self.features[sequence, frontier.origin], weights)
        features: Tensor = model.experts(vectors + path(embeddings, level, drafted_from)).features
        return features[:, :, 0]

    def _log_probs(
        self,
        features: Float[Tensor, "batch f components hidden"],
        token_ids: Int[Tensor, "batch f"],
    ) -> Float[Tensor, "batch f components drafted"]:
        """Return the log-probabilities of a level below the nodes with these tokens."""
        self.features = features
        tables = self.cache.model.path_tables
        if tables is None:
            return self.head.log_probs(features)
        logits = self.head.logits(features) + tables(token_ids).unsqueeze(2)
        return logits.log_softmax(dim=-1, dtype=torch.float32)

    def _run_drafter(self, depth: int, frontier: TreeLevel | None) -> ExpertsOutput:
        token_ids = self.root if frontier is None else frontier.token_ids
        base, model = self.lengths[:, None], self.cache.model
        positions = (base + (depth - 1)).expand_as(token_ids)
        offset, count = sum(before.shape[1] for before in self.positions), token_ids.shape[1]
        self.positions.append(positions)
        slots = base + torch.arange(offset, offset + count, device=base.device)
        start = None if self.start is None else self.start + offset
        stores = self.cache.write_through(slots, self.num_visible, start)
        mask = self.mask = self._mask(slots, frontier)
        embeddings = self.head.target.embed(token_ids).to(model.dtype)
        seen = mask if model.attends_first else mask & self._is_later
        if model.trunk.memory_norm is not None:  # nodes of a block attend to themselves and memory
            seen = torch.eye(count, dtype=torch.bool, device=mask.device).expand(len(mask), -1, -1)
        output: ExpertsOutput = model(
            embeddings,
            positions,
            seen.unsqueeze(1),
            self.inputs.of(embeddings, positions, frontier, self.output),
            stores,
            has_levels=depth == self.num_passes,
        )
        return self._through_tail(output, positions, slots, mask)

    def _mask(
        self, slots: Tensor, frontier: TreeLevel | None
    ) -> Bool[Tensor, "batch queries slots"]:
        """Return what queries attend to: all that their parents attend to, and themselves."""
        if frontier is None or self.mask is None:
            visible = torch.arange(self.num_visible, device=slots.device)
            self._is_later = visible > 0
            return (visible <= self.lengths[:, None]).unsqueeze(1)
        parents = frontier.origin[:, :, None].expand(-1, -1, self.num_visible)
        return self.mask.gather(1, parents).scatter_(2, slots.unsqueeze(2), True)

    def _through_tail(
        self, output: ExpertsOutput, positions: Tensor, slots: Tensor, mask: Tensor
    ) -> ExpertsOutput:
        """Return the output after the target's last layers, if the drafter uses these layers."""
        tail, cache = self.cache.tail, self.cache.tail_cache
        if tail is None or cache is None:
            return output
        if self.cache.model.transfers:
            return self._through_layers(output, positions, tail, cache)
        cache.set_slots(slots, mask.shape[2])
        read = torch.cat(self.positions, dim=1)
        written = self.lengths[:, None] + torch.arange(read.shape[1], device=slots.device)
        seen = positions_in_slots(written, read, mask.shape[2])
        return output.with_tail_output(
            tail.forward(output.mean_feature, positions, mask, seen, cache)
        )

    def _through_layers(
        self, output: ExpertsOutput, positions: Tensor, tail: TargetTail, cache: SlotCache
    ) -> ExpertsOutput:
        """Return the output after the target's last layers, which read the states of all levels."""
        rows = PseudoRows.of(output, positions)
        count = rows.states.shape[1]
        slots = self.lengths[:, None] + torch.arange(count, device=positions.device)
        num_visible = self.cache.num_visible(self.highest + count)
        mask = slot_mask(self.lengths, slots, rows.own, num_visible)
        cache.set_slots(slots, num_visible)
        seen = positions_in_slots(slots, rows.positions, num_visible)
        return with_features(output, tail.forward(*rows[:2], mask, seen, cache))
