"""The trained drafter: one session per request over the shared JakiroDrafter and its target."""

import torch
from jaxtyping import Int
from torch import Tensor

from inference.draft_tree import DraftTree
from inference.drafters.tree_pass import TreePass
from inference.protocol import Committed, MemoryRows, VerifyResult
from inference.row_buffer import RowBuffer, token_slots
from inference.sampling import Sampling
from inference.tree_builder import TreeBuilder, TreePlan, TreeShape
from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError
from jakiro.target import StepOutput, TargetAdapter


class TrainedDrafter:
    """Drafts with a `JakiroDrafter`; holds weights only, so threads may share it.

    Args:
        drafter: the trained model.
        target: supplies embeddings and logits.
        trees: how trees grow; more autoregressive levels than were trained are allowed.

    Raises:
        ConfigError: a tree asks for parallel levels that the drafter does not have.
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
        self.needs = frozenset({"memory"})
        self.version = drafter.config.target_record.fingerprint
        self.max_nodes = max(shape.max_nodes for shape in self.plan.shapes)
        self.max_depth = max(shape.depth for shape in self.plan.shapes)

    def open(self, sampling: Sampling, capacity: int, batch: int = 1) -> "TrainedSession":
        """Return a session for `batch` sequences of up to `capacity` tokens."""
        return TrainedSession(self, sampling, capacity, batch)

    def embed(self, token_ids: Int[Tensor, "batch rows"]) -> Tensor:
        """Return the target's embeddings in the drafter's dtype."""
        return self.target.embed(token_ids).to(self.model.dtype)

    def encode(self, output: StepOutput, rows: Int[Tensor, "batch rows"]) -> MemoryRows:
        """Return memory of the tokens at query indices `rows` of a target forward."""
        slots = output.step.slots.gather(1, rows)
        positions = output.step.positions.gather(1, rows)
        state = output.cache.rows(slots, self.model.memory_layers)
        return MemoryRows(int(positions[0, 0]), self.model.remember(state, positions), self.version)


class TrainedSession:
    """Cached rows of one request's final tokens; proposes trees below the root.

    Rows of final tokens stand at their positions. While drafting, the nodes of a tree that were
    expanded take the slots after the root's; the next round overwrites them.
    """

    def __init__(
        self, drafter: TrainedDrafter, sampling: Sampling, capacity: int, batch: int
    ) -> None:
        trunk = drafter.model.config.settings.trunk
        self.drafter = drafter
        self.sampling = sampling
        self.shape = shape = drafter.plan.shape(sampling)
        like = drafter.model.trunk.self_attention.output.weight
        scratch = shape.breadth * (shape.autoregressive_levels - 1)
        geometry = (trunk.num_kv_heads, capacity + 1 + scratch, trunk.head_dim)
        self.own_rows = RowBuffer(batch, *geometry, like)
        self.memory = RowBuffer(batch, *geometry, like)
        self.length = 0  # verified tokens, which is also the position of the root
        self.root: Tensor | None = None
        self.round_id = 0

    def advance(self, committed: Committed) -> None:
        """Store the rows of newly verified tokens and remember the root.

        Raises:
            ValueError: tokens are missing between the session and `committed`, or the memory was
                made by another encoder.
        """
        verified, root = committed.token_ids[:, :-1], committed.token_ids[:, -1:]
        start = committed.base_length - verified.shape[1]
        if self.root is not None and committed.base_length == self.length:
            return
        memory = committed.memory
        if memory is None or memory.encoder_version != self.drafter.version:
            raise ValueError("memory rows must come from the drafter's own encoder")
        if start != self.length or memory.base_length != start:
            raise ValueError(f"session ends at {self.length}, but the next tokens start at {start}")
        slots = token_slots(start, verified.shape[1], len(verified), verified.device)
        embeddings = self.drafter.embed(verified)
        self.own_rows.write(self.drafter.model.trunk.self_attention.rows(embeddings, slots), slots)
        self.memory.write(memory.tensors, slots)
        self.length, self.root = committed.base_length, root

    def propose(self, budget: int, generator: torch.Generator | None) -> DraftTree:
        """Return a tree of at most `budget` candidates below the root.

        Args:
            budget: number of nodes; a sampled tree that does not fit stays empty, for a tree must
                not be cut after it was drawn.
            generator: source of the draws of a sampled tree.
        """
        assert self.root is not None, "advance before propose"
        self.round_id += 1
        base_length = torch.full((len(self.root),), self.length, device=self.root.device)
        shape = self.shape
        if budget < 1 or (shape.sampled and budget < shape.max_nodes):
            return DraftTree.empty(base_length, self.round_id)
        shape = shape.model_copy(update={"num_nodes": min(budget, shape.num_nodes)})
        builder = TreeBuilder(shape, self.sampling, generator)
        return builder.build(self.start_tree(), base_length, self.round_id)

    def start_tree(self) -> TreePass:
        """Return the source of the laws of one tree below the root."""
        assert self.root is not None, "advance before propose"
        return TreePass(
            self.drafter.model,
            self.drafter.target,
            self.shape.autoregressive_levels,
            self.own_rows,
            self.memory.prefix(self.length),
            self.root,
        )

    def feedback(self, result: VerifyResult) -> None:
        """Learn nothing: the weights are fixed."""

    def rollback(self, length: int) -> None:
        """Forget the tokens from position `length` on; the next `advance` starts there."""
        self.length, self.root = min(length, self.length), None

    def close(self) -> None:
        """Free the cached rows."""
        del self.own_rows, self.memory
