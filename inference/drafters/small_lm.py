"""A drafter that is a small language model, and the session of this drafter."""

from collections.abc import Sequence

import torch
from pydantic import Field
from transformers import PreTrainedTokenizerBase

from inference.draft_tree import DraftTree
from inference.drafters.small_lm_cache import LMCache
from inference.protocol import Budget, Committed, Drafter, DraftSession
from inference.sampling.batch import BatchSampling
from inference.sampling.options import Sampling
from inference.sampling.random_numbers import StepRandom
from inference.trees.builder import TreeBuilder
from inference.trees.limits import MAX_PASSES, MOST_CANDIDATES
from inference.trees.shape import TreePlan, TreeShape
from jakiro.errors import TargetMismatch
from jakiro.target.adapter import TargetAdapter
from jakiro.target.checks import CausalLM
from jakiro.utils.pretrained import load_causal_lm, load_tokenizer
from jakiro.utils.settings import Settings


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
        """Return the shape of sampled or deterministic trees."""
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
        # Embeddings may be padded to different sizes, although the tokenizer is the same.
        vocab_size = int(target.config.get_text_config().vocab_size)
        self.vocab_size = min(self.model.spec.vocab_size, vocab_size)
        self.version = "lm"
        self.proposer_names = ("small model",)
        self.bytes_per_token = self.model.new_cache(1, 1).bytes_per_token
        self.shapes = [self.settings.shape(sampled) for sampled in (False, self.settings.sampled)]

    @property
    def plan(self) -> TreePlan:
        greedy, sampling = self.shapes
        return TreePlan(greedy=greedy, sampling=sampling)

    @property
    def max_nodes(self) -> int:
        return max(shape.max_nodes for shape in self.shapes)

    @property
    def max_depth(self) -> int:
        return max(shape.depth for shape in self.shapes)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str,
        target: CausalLM,
        tokenizer: PreTrainedTokenizerBase,
        settings: SmallLMSettings | None = None,
    ) -> "SmallLMDrafter":
        """Load a small model in the target's dtype."""
        check_same_tokenizer(load_tokenizer(name_or_path), tokenizer, name_or_path)
        model = load_causal_lm(name_or_path, "the small language model", dtype=target.dtype)
        return cls(model, target, settings)

    def new_session(self, sampling: Sampling, capacity: int, batch: int = 1) -> "SmallLMSession":
        return SmallLMSession(self, sampling, capacity, batch)

    def shape(self, sampling: Sampling) -> TreeShape:
        """Return the shape of a request's trees."""
        return self.shapes[sampling.do_sample]

    def can_share(self, one: Sampling, other: Sampling) -> bool:
        return self.shape(one) == self.shape(other)


class SmallLMSession(DraftSession):
    """Caches sequences for the small model, and proposes trees below the roots."""

    sampling: BatchSampling
    appends_copies = True

    def __init__(
        self, drafter: SmallLMDrafter, sampling: Sampling, capacity: int, batch: int
    ) -> None:
        self.drafter = drafter
        inner = max(shape.breadth * (shape.depth - 1) for shape in drafter.shapes)
        self.cache = LMCache(drafter.model, batch, capacity, inner, drafter.vocab_size)
        self.set_sampling(sampling)
        self.step_id = 0

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.cache.lengths

    @property
    def is_sampled(self) -> bool:
        return self.shape.sampled

    def advance(self, committed: Committed) -> None:
        self.cache.advance(committed)

    def propose(self, budget: Budget, random: StepRandom) -> DraftTree:
        self.step_id += 1
        base_length = torch.tensor(self.lengths, device=self.drafter.model.device)
        shape = _within(self.shape, budget)
        # A token at the model's last position can still be read, to predict the token after it.
        room = self.drafter.model.spec.max_position - min(self.lengths)
        if shape is None or room < 1:
            return DraftTree.empty(base_length, self.step_id)
        builder = TreeBuilder(shape, self.sampling, random)
        tree = builder.build(self.cache.start_tree(), base_length, self.step_id)
        return tree.limited(self.drafter.model.spec.max_position)

    def rollback(self, length: int) -> None:
        """Discard the tokens from position `length` on; the next `advance` starts there."""
        self.cache.rollback(length)

    def select_sequences(self, indices: Sequence[int]) -> None:
        self.cache.select_sequences(indices)
        self.sampling = self.sampling.of_sequences(indices)

    def append_sequences(self, other: DraftSession) -> None:
        """Add copies of the sequences of another session."""
        assert isinstance(other, SmallLMSession)
        self.cache.append_sequences(other.cache)
        self.sampling += other.sampling

    def set_sampling(self, sampling: Sampling) -> None:
        self.sampling = BatchSampling([sampling] * len(self.lengths))
        self.shape = self.drafter.shape(sampling)

    def reserve(self, capacity: int) -> None:
        self.cache.reserve(capacity)

    def clear_unused(self) -> None:
        self.cache.cache.clear_unused()

    def close(self) -> None:
        del self.cache


def _within(shape: TreeShape, budget: Budget) -> TreeShape | None:
    """Return the shape reduced to a budget, or None; the depth is reduced until a chain fits."""
    depth = shape.depth if budget.depth is None else budget.depth
    return shape.within(Budget(budget.num_nodes, min(depth, budget.num_nodes)))


def check_same_tokenizer(
    own: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase, name_or_path: str
) -> None:
    """Raise an error if a small model and the target have different token ids."""
    ours, theirs = own.get_vocab(), target.get_vocab()
    if ours != theirs:
        differing = sum(theirs.get(token) != number for token, number in ours.items())
        raise TargetMismatch(
            f"the small language model {name_or_path} does not have the target's tokenizer",
            expected=f"the target's vocabulary of {len(theirs)} tokens with the same ids",
            got=f"{len(ours)} tokens, of which {differing} are unknown to the target or have "
            "another id there",
            remedy="use a smaller model of the target's family",
        )
