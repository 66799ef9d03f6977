"""Sizes of the measurements on a GPU: target, contexts, trees, and numbers of repetitions."""

from dataclasses import dataclass

from inference.trees.shape import TreePlan, TreeShape

BUCKET = 64  # the capacities of static caches are multiples of this number, so that masks align


@dataclass(frozen=True)
class Geometry:
    """Geometry of a target of the Llama family."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    max_position: int


@dataclass(frozen=True)
class Scale:
    """Sizes that determine what is measured, and how long it takes.

    Attributes:
        geometry: geometry of the target.
        draft_vocab_size: number of tokens that the drafter may draft.
        main_context: number of tokens before the timed tokens in most sections.
        contexts: contexts of autoregressive decoding; the first is `main_context`.
        verify_contexts: contexts of the verification of trees; new key lengths begin at the second.
        queries: numbers of queries of a verification, from 1; the last but one is the tree's.
        tree: shape of the deterministic trees; the sampled trees have as many candidates.
        siblings: numbers of candidates below one node, for the time of acceptance.
        taus: numbers of tokens per decoding step of the oracle.
        batches: numbers of sequences that are decoded together.
        request_lengths: lengths of the prompts that are decoded one after the other.
        request_tokens: number of new tokens of each of these prompts.
        block: number of tokens or decoding steps between two readings of the clock.
        repeats: number of timed repetitions.
        warm_up: number of repetitions before the timed ones.
        num_steps: number of decoding steps that the profiler records.
        new_lengths: number of key lengths that were not used before.
    """

    geometry: Geometry
    draft_vocab_size: int
    contexts: tuple[int, ...]
    verify_contexts: tuple[int, ...]
    queries: tuple[int, ...]
    tree: TreeShape
    siblings: tuple[int, ...]
    taus: tuple[int, ...]
    batches: tuple[int, ...]
    request_lengths: tuple[int, ...]
    request_tokens: int
    block: int
    repeats: int
    warm_up: int
    num_steps: int
    new_lengths: int

    @property
    def main_context(self) -> int:
        """The context of most sections."""
        return self.contexts[0]

    @property
    def plan(self) -> TreePlan:
        """The shapes of the trees of greedy decoding and of sampling."""
        return TreePlan(greedy=self.tree, sampling=self.tree.model_copy(update={"sampled": True}))

    @property
    def timed_tokens(self) -> int:
        """The largest number of tokens that all repetitions of a measurement decode."""
        return (self.repeats + self.warm_up) * self.block

    def capacity(self, context: int, tokens: int) -> int:
        """Return a number of cache slots, a multiple of `BUCKET`.

        Args:
            context: number of tokens of the prompt.
            tokens: number of new tokens.
        """
        return -(-(context + tokens) // BUCKET) * BUCKET


FULL = Scale(
    geometry=Geometry(
        num_layers=32,
        hidden_size=4096,
        intermediate_size=14336,
        num_heads=32,
        num_kv_heads=8,
        vocab_size=128_256,
        max_position=131_072,
    ),
    draft_vocab_size=32_768,
    contexts=(2048, 512, 8192),
    verify_contexts=(2048, 8192, 32_768),
    queries=(1, 8, 16, 32, 61, 64),
    tree=TreeShape(autoregressive_levels=3, parallel_levels=1, children=4, breadth=5, num_nodes=60),
    siblings=(2, 4, 10),
    taus=(2, 3, 4),
    batches=(1, 8, 32),
    request_lengths=(100, 700, 300),
    request_tokens=256,
    block=16,
    repeats=20,
    warm_up=3,
    num_steps=20,
    new_lengths=8,
)

QUICK = Scale(
    geometry=Geometry(
        num_layers=2,
        hidden_size=64,
        intermediate_size=96,
        num_heads=4,
        num_kv_heads=2,
        vocab_size=1024,
        max_position=1024,
    ),
    draft_vocab_size=512,
    contexts=(24, 40),
    verify_contexts=(40, 100),
    queries=(1, 8, 15, 16),
    tree=TreeShape(autoregressive_levels=3, parallel_levels=1, children=2, breadth=2, num_nodes=14),
    siblings=(2, 4),
    taus=(2, 3),
    batches=(1, 2),
    request_lengths=(9, 20),
    request_tokens=8,
    block=2,
    repeats=2,
    warm_up=1,
    num_steps=2,
    new_lengths=2,
)
