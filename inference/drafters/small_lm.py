"""A smaller language model as the drafter, which keeps a cache of its own."""

from collections.abc import Sequence

import torch
from pydantic import Field
from transformers import PreTrainedTokenizerBase

from inference.draft_tree import DraftTree
from inference.drafters.base import WithoutMemory
from inference.drafters.small_lm_cache import LMCache
from inference.protocol import Budget, Committed, VerifyResult
from inference.sampling import Sampling
from inference.trees.builder import TreeBuilder
from inference.trees.shape import MAX_PASSES, TreeShape
from jakiro.errors import TargetMismatch
from jakiro.target.adapter import TargetAdapter
from jakiro.target.checks import CausalLM
from jakiro.utils.pretrained import load_causal_lm, load_tokenizer
from jakiro.utils.settings import Settings


class SmallLMSettings(Settings):
    """How large the trees are, and how their candidates are found."""

    depth: int = Field(3, ge=1, le=MAX_PASSES)  # passes of the small model for one tree
    children: int = Field(4, ge=1)  # candidates under each expanded node
    breadth: int = Field(3, ge=1)  # nodes expanded per level
    num_nodes: int | None = Field(None, ge=1)  # best candidates that are verified; None: all
    sampled: bool = True  # draw candidates where tokens are drawn, else always choose the likeliest

    def shape(self, sampled: bool) -> TreeShape:
        """Return the shape of trees."""
        shape = TreeShape(
            autoregressive_levels=self.depth,
            parallel_levels=0,
            children=self.children,
            breadth=self.breadth,
            sampled=sampled,
        )
        full = shape.model_copy(update={"num_nodes": sum(shape.level_sizes)})
        return full if self.num_nodes is None else _within(full, Budget(self.num_nodes)) or full


class SmallLMDrafter(WithoutMemory):
    """Drafts with another causal LM that has the target's tokenizer; threads may share it.

    Args:
        model: the small model; it is moved to the target's device.
        target: the model that it drafts for.
        settings: of the trees.

    Raises:
        TargetNotSupported: the small model cannot read a tree.
    """

    def __init__(
        self, model: CausalLM, target: CausalLM, settings: SmallLMSettings | None = None
    ) -> None:
        self.settings = settings or SmallLMSettings()
        self.model = TargetAdapter(model.eval().to(target.device))
        # Embeddings may be padded to different sizes beyond the tokens of one tokenizer.
        vocab_size = int(target.config.get_text_config().vocab_size)
        self.vocab_size = min(self.model.spec.vocab_size, vocab_size)
        self.version = "lm"
        self.bytes_per_token = self.model.new_cache(1, 1).bytes_per_token
        self.shapes = [self.settings.shape(sampled) for sampled in (False, self.settings.sampled)]
        self.max_nodes = max(one.max_nodes for one in self.shapes)
        self.max_depth = max(one.depth for one in self.shapes)

    @classmethod
    def from_pretrained(
        cls,
        place: str,
        target: CausalLM,
        tokenizer: PreTrainedTokenizerBase,
        settings: SmallLMSettings | None = None,
    ) -> "SmallLMDrafter":
        """Load a small model, in the target's dtype.

        Args:
            place: folder or hub id of the small model with its tokenizer.
            target: the model that it drafts for.
            tokenizer: of the target.
            settings: of the trees.

        Raises:
            CheckpointError: model or tokenizer cannot be loaded.
            TargetMismatch: it has another tokenizer than the target.
        """
        check_same_tokenizer(load_tokenizer(place), tokenizer, place)
        model = load_causal_lm(place, "the small language model", dtype=target.dtype)
        return cls(model, target, settings)

    def new_session(self, sampling: Sampling, capacity: int, batch: int = 1) -> "SmallLMSession":
        """Return a session for `batch` sequences of up to `capacity` tokens."""
        return SmallLMSession(self, sampling, capacity, batch)

    def shape(self, sampling: Sampling) -> TreeShape:
        """Return the tree for a request."""
        return self.shapes[sampling.do_sample]


class SmallLMSession:
    """The small model's own cache of sequences that are decoded together."""

    def __init__(
        self, drafter: SmallLMDrafter, sampling: Sampling, capacity: int, batch: int
    ) -> None:
        self.drafter = drafter
        self.set_sampling(sampling)
        inner = max(shape.breadth * (shape.depth - 1) for shape in drafter.shapes)
        self.rows = LMCache(drafter.model, batch, capacity, inner, drafter.vocab_size)
        self.step_id = 0

    @property
    def lengths(self) -> tuple[int, ...]:
        """Verified tokens taken in so far, per sequence."""
        return self.rows.lengths

    def advance(self, committed: Committed) -> None:
        """Take in newly verified tokens and the roots.

        Raises:
            ValueError: tokens are missing between the session and `committed`.
        """
        self.rows.advance(committed)

    def propose(self, budget: Budget, generators: Sequence[torch.Generator]) -> DraftTree:
        """Return trees below the roots, within the budget.

        Args:
            budget: fixes how many candidates are drawn before they are.
            generators: sources of the draws of sampled trees, one per sequence.
        """
        self.step_id += 1
        base_length = torch.tensor(self.lengths, device=self.drafter.model.device)
        shape = _within(self.shape, budget)
        # The model's last position predicts the token behind it.
        room = self.drafter.model.spec.max_position - min(self.lengths)
        if shape is None or room < 1:
            return DraftTree.empty(base_length, self.step_id)
        builder = TreeBuilder(shape, self.sampling, generators)
        tree = builder.build(self.rows.start_tree(), base_length, self.step_id)
        return tree.limited(self.drafter.model.spec.max_position)

    def on_verified(self, result: VerifyResult) -> None:
        """Learn nothing: the weights are fixed."""

    def on_finished(self, place: int, token_ids: Sequence[int]) -> None:
        """Learn nothing."""

    def rollback(self, length: int) -> None:
        """Forget the tokens from position `length` on; the next `advance` starts there."""
        self.rows.rollback(length)

    def select_sequences(self, places: Sequence[int]) -> None:
        """Forget all sequences but those at these places, which are ascending."""
        self.rows.select_sequences(places)

    def set_sampling(self, sampling: Sampling) -> None:
        """Draft for another way of sampling from now on."""
        self.sampling = sampling
        self.shape = self.drafter.shape(sampling)

    def reserve(self, capacity: int) -> None:
        """Make room for sequences of up to `capacity` tokens."""
        self.rows.reserve(capacity)

    def close(self) -> None:
        """Free the cache."""
        del self.rows


def _within(shape: TreeShape, budget: Budget) -> TreeShape | None:
    """Return the shape cut to a budget, a short chain where a full one does not fit."""
    depth = shape.depth if budget.depth is None else budget.depth
    return shape.within(Budget(budget.num_nodes, min(depth, budget.num_nodes)))


def check_same_tokenizer(
    own: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase, place: str
) -> None:
    """Refuse a small model whose ids mean other tokens than the target's.

    Args:
        own: tokenizer of the small model.
        target: tokenizer of the target.
        place: of the small model.

    Raises:
        TargetMismatch: the vocabularies differ.
    """
    ours, theirs = own.get_vocab(), target.get_vocab()
    if ours != theirs:
        differing = sum(theirs.get(token) != number for token, number in ours.items())
        raise TargetMismatch(
            f"the small language model {place} has another tokenizer than the target",
            expected=f"the same id for each of {len(theirs)} tokens",
            got=f"{len(ours)} tokens, {differing} of them with another id or unknown",
            remedy="use a smaller model of the target's own family",
        )
