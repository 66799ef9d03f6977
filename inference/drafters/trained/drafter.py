"""The adapter through which the decode engine drafts with a trained `JakiroDrafter` model."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from inference.draft_tree import DraftTree
from inference.drafters.trained.converted import FASTEST, head_form, layer_form, with_layers
from inference.drafters.trained.kv import DrafterCache
from inference.drafters.trained.tree_pass import TreePass
from inference.protocol import (
    Budget,
    Committed,
    DeviceSession,
    Drafter,
    DraftSession,
    EncodedMemory,
)
from inference.sampling.batch import BatchSampling
from inference.sampling.grammar import GrammarProcessor
from inference.sampling.options import Sampling
from inference.sampling.random_numbers import StepRandom
from inference.trees import MAX_PASSES
from inference.trees.builder import TreeBuilder
from inference.trees.shape import TreePlan, TreeShape
from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError
from jakiro.target.adapter import TargetAdapter, compile_mode
from jakiro.target.attention import without_cudnn
from jakiro.target.ends import TargetEnds
from jakiro.target.record import check_target, check_tokenizer
from jakiro.target.step import StepOutput
from jakiro.target.tail import TargetTail
from jakiro.target.weights import WeightForm


class TrainedDrafter(Drafter):
    """Drafter that uses a trained `JakiroDrafter` model, without request state; thread-safe.

    Args:
        target: target that supplies embeddings and logits; without its layers, the drafter's memory
            must come from elsewhere.
        forms: formats of the drafter's weights, of which the first that is possible is used for the
            head, and for the layers; if none is, those weights stay as they are. Every format gives
            the same distribution of the output, because a candidate is accepted by the probability
            with which it was drafted.

    Raises:
        ConfigError: a tree has more parallel levels than the drafter.
        TargetNotSupported: the drafter needs the target's last layers, but these cannot run
            separately.
    """

    def __init__(
        self,
        drafter: JakiroDrafter,
        target: TargetEnds,
        trees: TreeShape | TreePlan,
        forms: Sequence[WeightForm] = (),
    ) -> None:
        self.plan = TreePlan.of(trees)
        trained = drafter.config.settings.schedule.parallel_levels
        asked = max(shape.parallel_levels for shape in self.plan.shapes)
        if asked > trained:
            raise ConfigError(
                "the tree has more parallel levels than the drafter",
                expected=f"at most {trained}",
                got=asked,
                remedy=f"set parallel_levels={trained} in the tree's shape",
            )
        self.model = drafter
        self.preferred = tuple(forms)
        self.forms = head_form(drafter, target, forms), layer_form(drafter, forms)
        # The model that computes: the trained one, or its copy with layers in another format.
        self.network = with_layers(drafter, self.forms[1])
        self.target = target
        self.head = drafter.draft_head(target, self.forms[0])
        tail = drafter.config.settings.tail_layers
        self.tail: TargetTail | None = None
        if tail:
            assert isinstance(target, TargetAdapter), "its last layers are needed"
            self.tail = TargetTail(target, tail)
        self.needs = frozenset({"memory"})
        self.hidden_states = drafter.state_sources.hidden_states
        self.version = drafter.config.target_record.fingerprint
        self.bytes_per_token = self._bytes_per_token()
        experts = drafter.config.settings.experts
        if experts.num_active > 1:
            # Which experts are active differs from token to token.
            kind = "expert" if experts.active_experts is None else "choice"
            self.proposer_names = tuple(f"{kind} {index}" for index in range(experts.num_active))

    @classmethod
    def for_target(
        cls,
        drafter: JakiroDrafter,
        target: TargetAdapter,
        tokenizer: PreTrainedTokenizerBase | None = None,
        trees: TreeShape | TreePlan | None = None,
        *,
        compiled: bool = False,
        other_weights: bool = False,
        forms: Sequence[WeightForm] = FASTEST,
    ) -> "TrainedDrafter":
        """Move a trained model to the target's device and dtype, and return its drafter."""
        record = drafter.config.target_record
        check_target(record, target.spec, other_weights=other_weights)
        if tokenizer is not None:
            check_tokenizer(record, tokenizer)
        model = drafter.eval().to(device=target.device, dtype=target.dtype)
        if compiled:
            model.compile(mode=compile_mode(target.device))
        return cls(model, target, trees or default_tree(model), forms)

    @property
    def max_nodes(self) -> int:
        return max(shape.max_nodes for shape in self.plan.shapes)

    @property
    def max_depth(self) -> int:
        return max(shape.depth for shape in self.plan.shapes)

    def new_session(self, sampling: Sampling, capacity: int, batch: int = 1) -> "TrainedSession":
        return TrainedSession(self, sampling, capacity, batch)

    def can_share(self, one: Sampling, other: Sampling) -> bool:
        return self.plan.shape(one) == self.plan.shape(other)

    def embed(self, token_ids: Int[Tensor, "batch tokens"]) -> Tensor:
        """Return the target's embeddings in the drafter's dtype."""
        return self.target.embed(token_ids).to(self.model.dtype)

    def encode_memory(
        self, output: StepOutput, queries: Int[Tensor, "batch queries"] | None = None
    ) -> EncodedMemory:
        """Return the encoded memory of tokens that the target has read."""
        slots, positions = output.step.slots, output.step.positions
        if queries is not None:
            slots, positions = slots.gather(1, queries), positions.gather(1, queries)
        state = self.model.state_sources.read(output.cache, slots)
        with without_cudnn(positions.device):
            memory = self.network.encode_memory(state, positions)
        tail = () if self.tail is None else self.tail.kv(output.cache, slots)
        return EncodedMemory((*memory, *tail), self.version)

    def _bytes_per_token(self) -> int:
        shapes = (*self.model.trunk.kv_shapes, self.model.memory_shapes)
        values = sum(heads * dim for pairs in shapes for heads, dim in pairs)
        if self.model.num_earlier:
            values += self.model.config.target_record.hidden_size  # the token's embedding
        tail = 0 if self.tail is None else self.tail.new_cache(1, 1).bytes_per_token
        return values * self.model.dtype.itemsize + tail


def default_tree(drafter: JakiroDrafter) -> TreePlan:
    """Return tree shapes with the numbers of levels that the drafter was trained for."""
    defaults = TreePlan()
    return TreePlan(
        greedy=defaults.greedy.model_copy(update=drafter.levels),
        sampling=defaults.sampling.model_copy(update=drafter.levels),
    )


class TrainedSession(DeviceSession):
    """Caches verified tokens for a trained drafter, and proposes trees below the roots.

    The slot of a verified token is its position. While drafting, the expanded nodes of a tree are
    written to the slots after the root's slot; the next tree overwrites these slots.
    """

    lengths: tuple[int, ...] = ()
    sampling: BatchSampling
    appends_copies = True
    grammars: Sequence[GrammarProcessor | None] = ()

    def __init__(
        self, drafter: TrainedDrafter, sampling: Sampling, capacity: int, batch: int
    ) -> None:
        self.drafter = drafter
        self.lengths = (0,) * batch
        self.set_sampling(sampling)
        # Number of slots from the root on: the root, the expanded nodes, and one for padding.
        self.scratch = 2 + max(shape.breadth for shape in drafter.plan.shapes) * (MAX_PASSES - 1)
        self.cache = DrafterCache(drafter.network, drafter.tail, batch, capacity + self.scratch)
        self.root: Tensor | None = None
        self.start: int | None = None  # position of the only root, if it is exact and on a CPU
        self.base_length = torch.zeros(batch, dtype=torch.long, device=drafter.target.device)

    @property
    def is_sampled(self) -> bool:
        return self.shape.sampled

    def advance(self, committed: Committed) -> None:
        if self.root is not None and committed.base_length == self.lengths:
            return
        memory = committed.memory
        if memory is None or memory.encoder_version != self.drafter.version:
            raise ValueError("the memory was not encoded by this drafter")
        starts = committed.starts_after(self.lengths)
        positions = self._positions(committed)
        embeddings = self.drafter.embed(committed.token_ids)
        with without_cudnn(self.base_length.device):
            highest = max(committed.base_length)
            start = self._only(starts) if not committed.is_padded else None
            self.cache.write(embeddings, memory.tensors, positions, highest, start)
        self.start = None if start is None else highest
        self.lengths = committed.base_length
        self.root, self.base_length = committed.root, committed.end

    def propose(self, budget: Budget, random: StepRandom) -> DraftTree:
        """Return trees below the roots, within the budget.

        Args:
            budget: limits of every tree. If even the smallest sampled tree exceeds these limits,
                the trees are empty, because candidates must not be removed after sampling.
        """
        assert self.root is not None, "advance before propose"
        base_length = self.base_length
        cut = self.shape.within(budget)
        if cut is None:
            return DraftTree.empty(base_length)
        builder = TreeBuilder(cut, self.sampling, random, self.grammars)
        with without_cudnn(base_length.device):
            passes = self.start_tree(cut.autoregressive_levels, cut.breadth)
            return builder.build(passes, base_length)

    def start_tree(self, num_passes: int | None = None, breadth: int | None = None) -> TreePass:
        """Return the predictor of trees below the roots, of the session's shape by default."""
        assert self.root is not None, "advance before propose"
        num_passes = num_passes or self.shape.autoregressive_levels
        return TreePass(
            self.cache,
            self.drafter.head,
            num_passes,
            1 + (num_passes - 1) * (breadth or self.shape.breadth),
            self.root,
            self.base_length,
            max(self.lengths),
            self.start,
        )

    def _only(self, starts: tuple[int, ...]) -> int | None:
        """Return the start of the only sequence, for writes to consecutive slots on a CPU."""
        is_on_cpu = self.base_length.device.type == "cpu"
        return starts[0] if len(starts) == 1 and is_on_cpu else None

    def show_rows(self, sampling: BatchSampling) -> None:
        self.sampling, count = sampling, len(sampling.each)
        self.cache.show_rows(count, self._margin)
        self.lengths, self.root = (0,) * count, None
        self.base_length = self.base_length.new_zeros(count)

    def follow(
        self,
        lengths: tuple[int, ...],
        base_length: Int[Tensor, " batch"],
        root: Int[Tensor, "batch 1"],
    ) -> None:
        self.lengths, self.base_length, self.root = lengths, base_length, root
        self.start = None

    def rollback(self, length: int) -> None:
        """Discard the tokens from position `length` on; the next `advance` starts there."""
        self.lengths = tuple(min(length, former) for former in self.lengths)
        self.root = None

    @property
    def _margin(self) -> int:
        """The number of slots that may be in use after the last verified token.

        A step that is discarded may have written the tokens of another step.
        """
        return 2 * (self.scratch + self.drafter.max_depth)

    def select_sequences(self, indices: Sequence[int]) -> None:
        num_used = [length + self._margin for length in self.lengths]
        self.cache.select_sequences(indices, num_used)
        self.lengths = tuple(self.lengths[index] for index in indices)
        self.sampling, self.start = self.sampling.of_sequences(indices), None
        index = torch.tensor(indices, dtype=torch.long, device=self.base_length.device)
        self.root = None if self.root is None else self.root[index]
        self.base_length = self.base_length[index]

    def append_sequences(self, other: DraftSession) -> None:
        """Add copies of the sequences of another session, whose verified tokens are cached."""
        assert isinstance(other, TrainedSession)
        assert other.root is not None
        self.cache.append_sequences(other.cache)
        self.start = None
        own_root = other.root[:0] if self.root is None else self.root
        self.root = torch.cat((own_root, other.root))
        self.base_length = torch.cat((self.base_length, other.base_length))
        self.lengths += other.lengths
        self.sampling += other.sampling

    def set_sampling(self, sampling: Sampling) -> None:
        self.sampling = BatchSampling([sampling] * len(self.lengths))
        self.shape = self.drafter.plan.shape(sampling)

    def constrain(self, grammars: Sequence[GrammarProcessor | None]) -> None:
        self.grammars = grammars

    def reserve(self, capacity: int) -> None:
        self.cache.reserve(capacity + self.scratch)

    def close(self) -> None:
        del self.cache

    def _positions(self, committed: Committed) -> Int[Tensor, "batch verified"]:
        """Return the positions of committed tokens; the position of padding is the last slot."""
        count = committed.token_ids.shape[1]
        offsets = torch.arange(count, device=committed.start.device)
        positions = committed.start[:, None] + offsets
        if not committed.is_padded:
            return positions
        is_padding = positions >= committed.end[:, None]
        return positions.masked_fill(is_padding, self.cache.capacity - 1)
