"""The trained drafter: one session per request over the shared JakiroDrafter and its target."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from inference.draft_tree import DraftTree
from inference.drafters.trained.kv import DrafterCache
from inference.drafters.trained.tree_pass import TreePass
from inference.protocol import Budget, Committed, EncodedMemory, RequestCounter, VerifyResult
from inference.sampling import Sampling
from inference.trees.builder import TreeBuilder
from inference.trees.shape import MAX_PASSES, TreePlan, TreeShape
from jakiro.draft_head import DraftHead
from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError
from jakiro.target.adapter import StepOutput, TargetAdapter
from jakiro.target.tail import TargetTail


class TrainedDrafter:
    """Drafts with a `JakiroDrafter`; holds weights only, so threads may share it.

    Args:
        drafter: the trained model.
        target: supplies embeddings and logits.
        trees: how trees grow; more autoregressive levels than were trained are allowed.

    Raises:
        ConfigError: a tree asks for parallel levels that the drafter does not have.
        TargetNotSupported: the drafter needs the target's last layers, which cannot be had alone.
    """

    def __init__(
        self, drafter: JakiroDrafter, target: TargetAdapter, trees: TreeShape | TreePlan
    ) -> None:
        self.plan = TreePlan.of(trees)
        trained = drafter.config.settings.schedule.parallel_levels
        asked = max(shape.parallel_levels for shape in self.plan.shapes)
        if asked > trained:
            raise ConfigError(
                "the tree has more parallel levels than the drafter",
                expected=f"at most {trained}",
                got=asked,
                remedy="lower parallel_levels or train a drafter with more",
            )
        self.model = drafter
        self.target = target
        self.head = DraftHead(target, drafter.draft_ids)
        tail = drafter.config.settings.tail_layers
        self.tail = TargetTail(target, tail) if tail else None
        self.needs = frozenset({"memory"})
        self.request_counter: RequestCounter | None = None
        self.hidden_states = drafter.state_sources.hidden_states
        self.version = drafter.config.target_record.fingerprint
        self.max_nodes = max(shape.max_nodes for shape in self.plan.shapes)
        self.max_depth = max(shape.depth for shape in self.plan.shapes)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a session takes for each token of a sequence."""
        shapes = (*self.model.trunk.self_attention.kv_shapes, *self.model.memory_shapes)
        values = sum(heads * dim for heads, dim in shapes)
        tail = 0 if self.tail is None else self.tail.new_cache(1, 1).bytes_per_token
        return values * self.model.dtype.itemsize + tail

    def new_session(self, sampling: Sampling, capacity: int, batch: int = 1) -> "TrainedSession":
        """Return a session for `batch` sequences of up to `capacity` tokens."""
        return TrainedSession(self, sampling, capacity, batch)

    def reset(self) -> None:
        """Nothing is learnt from requests."""

    def embed(self, token_ids: Int[Tensor, "batch rows"]) -> Tensor:
        """Return the target's embeddings in the drafter's dtype."""
        return self.target.embed(token_ids).to(self.model.dtype)

    def encode_memory(
        self, output: StepOutput, rows: Int[Tensor, "batch rows"] | None = None
    ) -> EncodedMemory:
        """Return memory of the tokens at query indices `rows` (None: all) of what was read."""
        slots, positions = output.step.slots, output.step.positions
        if rows is not None:
            slots, positions = slots.gather(1, rows), positions.gather(1, rows)
        state = self.model.state_sources.read(output.cache, slots)
        memory = self.model.encode_memory(state, positions)
        tail = () if self.tail is None else self.tail.kv(output.cache, slots)
        return EncodedMemory((*memory, *tail), self.version)


class TrainedSession:
    """Cached rows of final tokens; proposes trees below the roots.

    Rows of final tokens stand at their positions. While drafting, the nodes of a tree that were
    expanded take the slots after the root's; the next round overwrites them.
    """

    def __init__(
        self, drafter: TrainedDrafter, sampling: Sampling, capacity: int, batch: int
    ) -> None:
        self.drafter = drafter
        self.set_sampling(sampling)
        # Behind the root: nodes that are expanded, and one slot where padding goes.
        self.scratch = 2 + max(shape.breadth for shape in drafter.plan.shapes) * (MAX_PASSES - 1)
        self.cache = DrafterCache(drafter.model, drafter.tail, batch, capacity + self.scratch)
        self.lengths = (0,) * batch
        self.root: Tensor | None = None
        self.step_id = 0

    def advance(self, committed: Committed) -> None:
        """Store the rows of newly verified tokens and remember the roots.

        Raises:
            ValueError: tokens are missing between the session and `committed`, or the memory was
                made by another encoder.
        """
        if self.root is not None and committed.base_length == self.lengths:
            return
        starts = _starts(committed)
        memory = committed.memory
        if memory is None or memory.encoder_version != self.drafter.version:
            raise ValueError("memory rows must come from the drafter's own encoder")
        if starts != self.lengths:
            raise ValueError(f"session ends at {self.lengths}, the next tokens start at {starts}")
        positions = self._positions(committed)
        self.cache.write(self.drafter.embed(committed.token_ids), memory.tensors, positions)
        self.lengths, self.root = committed.base_length, committed.root

    def propose(self, budget: Budget, generators: Sequence[torch.Generator]) -> DraftTree:
        """Return trees below the roots, within the budget.

        Args:
            budget: a sampled tree that does not fit its number of nodes stays empty, for a tree
                must not be cut after it was drawn.
            generators: sources of the draws of sampled trees, one per sequence.
        """
        assert self.root is not None, "advance before propose"
        self.step_id += 1
        base_length = self._base_length()
        shape = self.shape.within(budget)
        if shape is None:
            return DraftTree.empty(base_length, self.step_id)
        builder = TreeBuilder(shape, self.sampling, generators)
        return builder.build(self.start_tree(shape), base_length, self.step_id)

    def start_tree(self, shape: TreeShape | None = None) -> TreePass:
        """Return the source of the laws of trees below the roots."""
        assert self.root is not None, "advance before propose"
        return TreePass(
            self.cache,
            self.drafter.head,
            (shape or self.shape).autoregressive_levels,
            self.root,
            self._base_length(),
            max(self.lengths),
        )

    def on_verified(self, result: VerifyResult) -> None:
        """Learn nothing: the weights are fixed."""

    def on_finished(self, place: int, token_ids: Sequence[int]) -> None:
        """Learn nothing."""

    def rollback(self, length: int) -> None:
        """Forget the tokens from position `length` on; the next `advance` starts there."""
        self.lengths = tuple(min(length, one) for one in self.lengths)
        self.root = None

    def select_sequences(self, places: Sequence[int]) -> None:
        """Forget all sequences but those at these places, which are ascending."""
        self.cache.select_sequences(places)
        self.lengths = tuple(self.lengths[place] for place in places)
        self.root = None if self.root is None else self.root[list(places)]

    def set_sampling(self, sampling: Sampling) -> None:
        """Draft for another way of sampling from now on."""
        self.sampling = sampling
        self.shape = self.drafter.plan.shape(sampling)

    def reserve(self, capacity: int) -> None:
        """Make room for sequences of up to `capacity` tokens."""
        self.cache.reserve(capacity + self.scratch)

    def close(self) -> None:
        """Free the cached rows."""
        del self.cache

    def _base_length(self) -> Int[Tensor, " batch"]:
        return torch.tensor(self.lengths, device=self.drafter.target.device)

    def _positions(self, committed: Committed) -> Int[Tensor, "batch verified"]:
        """Return where committed tokens stand; padding goes to the last slot."""
        count = committed.token_ids.shape[1]
        device = committed.token_ids.device
        places = torch.arange(count, device=device)
        positions = torch.tensor(_starts(committed), device=device)[:, None] + places
        if min(committed.num_verified) == count:
            return positions
        is_padding = places >= torch.tensor(committed.num_verified, device=device)[:, None]
        return positions.masked_fill(is_padding, self.cache.capacity - 1)


def _starts(committed: Committed) -> tuple[int, ...]:
    """Return the position of the first verified token of each sequence."""
    pairs = zip(committed.base_length, committed.num_verified, strict=True)
    return tuple(base - count for base, count in pairs)
