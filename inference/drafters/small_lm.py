"""A drafter that is a small language model, with its sessions and its passes over one tree."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from inference.draft_tree import DraftTree
from inference.protocol import Budget, Committed, Drafter, DraftSession
from inference.sampling.batch import BatchSampling
from inference.sampling.grammar import GrammarProcessor
from inference.sampling.options import Sampling
from inference.sampling.random_numbers import StepRandom
from inference.trees import MAX_PASSES, MOST_CANDIDATES
from inference.trees.builder import TreeBuilder, TreeLevel
from inference.trees.shape import TreePlan, TreeShape
from jakiro.errors import TargetMismatch, TargetNotSupported
from jakiro.target.adapter import TargetAdapter
from jakiro.target.cache import SlotCache
from jakiro.target.checks import CausalLM
from jakiro.target.step import StepInput, WrittenNodes
from jakiro.utils.pretrained import load_causal_lm, load_tokenizer
from jakiro.utils.settings import Settings

WAITING = 64  # largest number of verified tokens that wait to be read together with the root


class SmallLMSettings(Settings):
    """Settings for the size of the trees and the selection of candidates."""

    depth: int = Field(3, ge=1, le=MAX_PASSES)  # number of the small model's passes for one tree
    # number of candidates under each expanded node
    children: int = Field(4, ge=1, le=MOST_CANDIDATES)
    breadth: int = Field(3, ge=1, le=MOST_CANDIDATES)  # number of nodes expanded per level
    # number of candidates to verify; None for all
    num_nodes: int | None = Field(None, ge=1, le=MOST_CANDIDATES)
    sampled: bool = True  # whether to sample candidates for requests that sample tokens

    def shape(self, sampled: bool) -> TreeShape:
        shape = TreeShape.model_construct(
            autoregressive_levels=self.depth,
            parallel_levels=0,
            children=self.children,
            breadth=self.breadth,
            sampled=sampled,
        )
        full = shape.model_copy(update={"num_nodes": sum(shape.level_sizes)})
        return full if self.num_nodes is None else _within(full, Budget(self.num_nodes)) or full


class SmallLMDrafter(Drafter):
    """Drafter that uses a small causal LM with the target's tokenizer; thread-safe.

    Example:
        decoder = SpeculativeDecoder(target, SmallLMDrafter(small_lm, target), tokenizer)
        output = decoder.generate("def main(", max_new_tokens=16)
    """

    def __init__(
        self, model: CausalLM, target: CausalLM, settings: SmallLMSettings | None = None
    ) -> None:
        self.settings = settings or SmallLMSettings()
        self.model = TargetAdapter(model.eval().to(target.device))
        if self.model.spec.is_recurrent:
            raise TargetNotSupported(
                "a small language model with recurrent layers cannot draft trees"
            )
        # Embeddings may be padded to different sizes, although the tokenizer is the same.
        vocab_size = int(target.config.get_text_config().vocab_size)
        self.vocab_size = min(self.model.spec.vocab_size, vocab_size)
        self.version = "lm"
        self.proposer_names = ("small model",)
        self.bytes_per_token = self.model.new_cache(1, 1).bytes_per_token
        greedy, sampling = map(self.settings.shape, (False, self.settings.sampled))
        self.plan = TreePlan(greedy=greedy, sampling=sampling)

    @property
    def max_nodes(self) -> int:
        return max(shape.max_nodes for shape in self.plan.shapes)

    @property
    def max_depth(self) -> int:
        return max(shape.depth for shape in self.plan.shapes)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str,
        target: CausalLM,
        tokenizer: PreTrainedTokenizerBase,
        settings: SmallLMSettings | None = None,
    ) -> "SmallLMDrafter":
        check_same_tokenizer(load_tokenizer(name_or_path), tokenizer, name_or_path)
        model = load_causal_lm(name_or_path, "the small language model", dtype=target.dtype)
        return cls(model, target, settings)

    def new_session(self, sampling: Sampling, capacity: int, batch: int = 1) -> "SmallLMSession":
        return SmallLMSession(self, sampling, capacity, batch)

    def can_share(self, one: Sampling, other: Sampling) -> bool:
        return self.plan.shape(one) == self.plan.shape(other)


class LMPass:
    """A `JointPredictor` for one tree; writes nodes to the cache slots after the root's slot."""

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
        self.parents = self.positions = self.token_ids  # those of the nodes read so far
        self.seen = torch.zeros(len(self.lengths), 1, 0, dtype=torch.bool, device=model.device)
        self._first = 0  # index of the first node of the last level read

    draft_ids: Tensor | None = None  # all tokens may be drafted

    def joint(
        self, depth: int, frontier: TreeLevel | None
    ) -> Float[Tensor, "batch f components vocab"]:
        features = self.features if frontier is None else self._read(depth, frontier)
        logits = self.model.logits(features)[..., : self.vocab_size]
        return logits.float().log_softmax(dim=-1).unsqueeze(2)

    def accepted(self, index: int, token_ids: Sequence[int]) -> list[int]:
        """Return the slots of the nodes that were read along a path from the root."""
        pairs = zip(self.parents[index].tolist(), self.token_ids[index].tolist(), strict=True)
        node_of = {pair: node for node, pair in enumerate(pairs)}  # (parent, token) -> node
        slots: list[int] = []
        node = -1
        for token in token_ids:
            if (node := node_of.get((node, token), -1)) < 0:
                break
            slots.append(self.lengths[index] + 1 + node)
        return slots

    def select_sequences(self, indices: Sequence[int]) -> None:
        """Keep only the sequences at these batch indices; then only `accepted` may be called."""
        self.lengths = [self.lengths[index] for index in indices]
        self.token_ids = self.token_ids[list(indices)]
        self.parents = self.parents[list(indices)]

    def _read(self, depth: int, frontier: TreeLevel) -> Float[Tensor, "batch f hidden"]:
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
            written=WrittenNodes(slots, self.positions, self.seen),
        )
        return self.model.forward(step, self.cache).features

    def _take_in(self, depth: int, frontier: TreeLevel) -> None:
        """Add the nodes of a frontier, which attend to themselves and to their ancestors."""
        count = frontier.token_ids.shape[1]
        itself = torch.eye(count, dtype=torch.bool, device=self.seen.device)
        index = frontier.origin[:, :, None].expand(-1, -1, self.seen.shape[2])
        self.seen = torch.cat(
            (self.seen.gather(1, index), itself.expand(len(frontier.origin), -1, -1)), dim=2
        )
        # The parent of first-level nodes is the root, whose index is -1.
        parents = frontier.origin + self._first if depth > 2 else frontier.origin - 1
        self._first = self.token_ids.shape[1]
        # Padding of sampled trees may have any position, because no query attends to padding.
        highest = self.model.spec.max_position - 1
        positions = (self.num_read[:, None] + (depth - 2)).clamp(max=highest)
        self.token_ids = torch.cat((self.token_ids, frontier.token_ids), dim=1)
        self.parents = torch.cat((self.parents, parents), dim=1)
        self.positions = torch.cat((self.positions, positions.expand_as(parents)), dim=1)


class SmallLMSession(DraftSession):
    """Caches sequences for the small model, and proposes trees below the roots.

    The cache contains verified tokens, each in the slot of its position, followed by tree nodes.
    Keys and values of accepted nodes are moved to the slots of their positions; those of rejected
    nodes are overwritten later.
    """

    lengths: tuple[int, ...] = ()
    sampling: BatchSampling
    appends_copies = True
    grammars: Sequence[GrammarProcessor | None] = ()

    def __init__(
        self, drafter: SmallLMDrafter, sampling: Sampling, capacity: int, batch: int
    ) -> None:
        self.drafter, self.model = drafter, drafter.model
        # Number of slots from the root on: the root, the nodes that are read, and one for padding.
        self.scratch = 2 + max(shape.breadth * (shape.depth - 1) for shape in drafter.plan.shapes)
        self.cache: SlotCache = self.model.new_cache(batch, capacity + self.scratch)
        self.lengths = (0,) * batch
        self.set_sampling(sampling)
        self._tokens: list[list[int]] = [[] for _ in range(batch)]  # verified tokens, then the root
        self._num_read = [0] * batch  # number of cached tokens
        self._tree: LMPass | None = None
        self._has_root = False

    @property
    def is_sampled(self) -> bool:
        return self.shape.sampled

    def advance(self, committed: Committed) -> None:
        if self._has_root and committed.base_length == self.lengths:
            return
        starts = committed.starts_after(self.lengths)
        news = zip(committed.token_ids.tolist(), committed.root.tolist(), strict=True)
        for index, (verified, root) in enumerate(news):
            added = [*verified[: committed.num_verified[index]], *root]
            self._tokens[index][starts[index] :] = added
        self._keep_accepted(starts)
        self.lengths, self._has_root = committed.base_length, True
        behind = zip(self.lengths, self._num_read, strict=True)
        if max(length - read for length, read in behind) > WAITING:
            self._read(self.lengths)

    def propose(self, budget: Budget, random: StepRandom) -> DraftTree:
        base_length = torch.tensor(self.lengths, device=self.model.device)
        shape = _within(self.shape, budget)
        # A token at the model's last position can still be read, to predict the token after it.
        room = self.model.spec.max_position - min(self.lengths)
        if shape is None or room < 1:
            return DraftTree.empty(base_length)
        builder = TreeBuilder(shape, self.sampling, random, self.grammars)
        tree = builder.build(self.start_tree(), base_length)
        return tree.limited(self.model.spec.max_position)

    def start_tree(self) -> LMPass:
        """Read all unread tokens, including the roots, and return the predictor of a tree."""
        assert self._has_root, "advance before propose"
        # A root that was already read is read again, because its feature is needed.
        pairs = zip(self._num_read, self.lengths, strict=True)
        self._num_read = [min(read, length) for read, length in pairs]
        features = self._read([length + 1 for length in self.lengths])
        vocab_size = self.drafter.vocab_size
        self._tree = LMPass(self.model, self.cache, vocab_size, features, self.lengths)
        return self._tree

    def rollback(self, length: int) -> None:
        """Discard the tokens from position `length` on; the next `advance` starts there."""
        self.lengths = tuple(min(length, former) for former in self.lengths)
        self._num_read = [min(length, count) for count in self._num_read]
        self._tree, self._has_root = None, False

    def select_sequences(self, indices: Sequence[int]) -> None:
        margin = 2 * (self.scratch + WAITING)  # for padding, too
        self.cache.select_sequences(indices, [length + margin for length in self.lengths])
        self.sampling = self.sampling.of_sequences(indices)
        self.lengths = tuple(self.lengths[index] for index in indices)
        self._tokens = [self._tokens[index] for index in indices]
        self._num_read = [self._num_read[index] for index in indices]
        if not indices:
            self._tree, self._has_root = None, False
        if self._tree is not None:
            self._tree.select_sequences(indices)

    def append_sequences(self, other: DraftSession) -> None:
        """Add copies of the sequences of another session; neither may have a pending tree."""
        assert isinstance(other, SmallLMSession)
        assert self._tree is None
        assert other._tree is None
        self.cache.append_sequences(other.cache)
        self.sampling += other.sampling
        self.lengths += other.lengths
        self._tokens += [list(tokens) for tokens in other._tokens]
        self._num_read += other._num_read
        self._has_root = other._has_root

    def set_sampling(self, sampling: Sampling) -> None:
        self.sampling = BatchSampling([sampling] * len(self.lengths))
        self.shape = self.drafter.plan.shape(sampling)

    def constrain(self, grammars: Sequence[GrammarProcessor | None]) -> None:
        self.grammars = grammars

    def reserve(self, capacity: int) -> None:
        self.cache.reserve(capacity + self.scratch)

    def close(self) -> None:
        del self.cache

    def _keep_accepted(self, starts: Sequence[int]) -> None:
        if self._tree is None:
            return
        sources: list[list[int]] = []
        for index, start in enumerate(starts):
            path = self._tokens[index][start + 1 : -1]  # after the former root
            sources.append(self._tree.accepted(index, path))
        moves = [(slots, start + 1) for slots, start in zip(sources, starts, strict=True)]
        _move(self.cache, moves, self.model.device)
        self._num_read = [first + len(slots) for slots, first in moves]
        self._tree = None

    def _read(self, ends: Sequence[int]) -> Float[Tensor, "batch 1 hidden"]:
        """Read every sequence up to `ends`; return the feature of each sequence's last token."""
        ends = [max(pair) for pair in zip(self._num_read, ends, strict=True)]
        spans = list(zip(self._tokens, self._num_read, ends, strict=True))
        width = max(end - start for _, start, end in spans)
        # Padding is written to slots that are overwritten before any query attends to them.
        padded = [[*ids[a:b], *[0] * (width - (b - a))] for ids, a, b in spans]
        device = self.model.device
        starts = torch.tensor(self._num_read, device=device)
        slots = starts[:, None] + torch.arange(width, device=device)
        highest = self.model.spec.max_position - 1
        step = StepInput(
            token_ids=torch.tensor(padded, device=device).clamp(max=self.model.spec.vocab_size - 1),
            positions=slots.clamp(max=highest),
            slots=slots.clamp(max=self.cache.capacity - 1),
            lengths=starts,
            highest_slot=min(max(self._num_read) + width, self.cache.capacity) - 1,
        )
        features = self.model.forward(step, self.cache).features
        last = torch.tensor([max(end - start, 1) - 1 for _, start, end in spans], device=device)
        self._num_read = ends
        return features.gather(1, last[:, None, None].expand(-1, 1, features.shape[2]))


def _move(cache: SlotCache, moves: Sequence[tuple[list[int], int]], device: torch.device) -> None:
    width = max(len(slots) for slots, _ in moves)
    if all(slots == list(range(first, first + len(slots))) for slots, first in moves):
        return
    # Padding copies the slot of the root, which precedes the first new slot, onto itself.
    padded = [[*slots, *[first - 1] * (width - len(slots))] for slots, first in moves]
    final = [
        [*range(first, first + len(slots)), *[first - 1] * (width - len(slots))]
        for slots, first in moves
    ]
    cache.move(torch.tensor(padded, device=device), torch.tensor(final, device=device))


def _within(shape: TreeShape, budget: Budget) -> TreeShape | None:
    """Return the shape reduced to a budget, or None; the depth is reduced until a chain fits."""
    depth = shape.depth if budget.depth is None else budget.depth
    return shape.within(Budget(budget.num_nodes, min(depth, budget.num_nodes)))


def check_same_tokenizer(
    tokenizer: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase, name_or_path: str
) -> None:
    """Raise an error if a small model and the target have different token ids."""
    ours, theirs = tokenizer.get_vocab(), target.get_vocab()
    if ours != theirs:
        differing = sum(theirs.get(token) != number for token, number in ours.items())
        raise TargetMismatch(
            f"the small language model {name_or_path} does not have the target's tokenizer",
            expected=f"the target's vocabulary of {len(theirs)} tokens with the same ids",
            got=f"{len(ours)} tokens, of which {differing} are unknown to the target or have "
            "another id there",
            remedy="use a smaller model of the target's family",
        )
