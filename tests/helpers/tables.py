"""Random distributions for every prefix, which stand in for the networks of target and drafter."""

import itertools
from collections.abc import Callable
from functools import cache

import torch
from helpers.branching import Chooser, distribution_of
from torch import Tensor
from transformers import LogitsProcessorList

from inference.draft_tree import ROOT, DraftTree, SequenceTree, SparseDistribution
from inference.engine import accept
from inference.engine.acceptance import ProcessedDistribution
from inference.sampling.batch import BatchSampling
from inference.sampling.options import Sampling
from inference.trees.builder import JointPredictor, TreeBuilder, TreeLevel
from inference.trees.shape import TreeShape

Prefix = tuple[int, ...]


class Tables:
    """Random target logits and draft experts that depend on the whole prefix, in float64."""

    def __init__(self, vocab: int, components: int, seed: int, sharpness: float = 1.5) -> None:
        self.vocab, self.components = vocab, components
        self.seed, self.sharpness = seed, sharpness

    def _random(self, kind: int, prefix: Prefix, *shape: int) -> Tensor:
        key = hash((self.seed, kind, prefix)) % (1 << 62)
        generator = torch.Generator().manual_seed(key)
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * self.sharpness

    def target_logits(self, prefix: Prefix) -> Tensor:
        """Return the target's unprocessed logits after a prefix, [vocab]."""
        return self._random(0, prefix, self.vocab)

    def joint(self, prefix: Prefix) -> Tensor:
        """Return log(w_e p_e(t)) for each draft expert e and token t, [experts, vocab]."""
        log_probs = self._random(1, prefix, self.components, self.vocab).log_softmax(-1)
        return log_probs + self._random(2, prefix, self.components).log_softmax(-1)[:, None]

    def source(self, prefix: Prefix) -> JointPredictor:
        """Return the draft distributions of trees below a prefix."""
        return TableSource(self, prefix)


def frontier_of(token_ids: Tensor, origin: Tensor) -> TreeLevel:
    """Return a frontier of nodes, given their tokens and their parents in the previous frontier."""
    zeros = torch.zeros_like(token_ids)
    return TreeLevel(token_ids, origin, zeros, zeros.float(), zeros[:, :1], columns=token_ids)


class TableSource:
    """A `JointPredictor` that reads `Tables`, for trees below one prefix."""

    draft_ids = None

    def __init__(self, tables: Tables, prefix: Prefix) -> None:
        self.tables = tables
        self.frontier = [prefix]

    def joint(self, depth: int, frontier: TreeLevel | None) -> Tensor:
        """Return log(w_e p_e(t)) after the path to each node, [1, nodes, experts, vocab]."""
        if frontier is not None:
            tokens, origins = frontier.token_ids[0].tolist(), frontier.origin[0].tolist()
            pairs = zip(tokens, origins, strict=True)
            self.frontier = [(*self.frontier[origin], token) for token, origin in pairs]
        return torch.stack([self.tables.joint(prefix) for prefix in self.frontier])[None]


class BranchingBuilder(TreeBuilder):
    """A tree builder that samples children one by one with a chooser."""

    chooser: Chooser

    def _noise(self, vocab: int) -> list[Tensor]:
        return [torch.empty(0)] * self.shape.depth

    def _sample(
        self, draft_probs: SparseDistribution, noise: Tensor, count: int
    ) -> tuple[Tensor, Tensor]:
        pairs = zip(draft_probs.ids[0], draft_probs.probs[0], strict=True)
        sampled = [self._sample_at(ids, probs, count) for ids, probs in pairs]
        tokens, log_probs = zip(*sampled, strict=True)
        return torch.stack(tokens)[None], torch.stack(log_probs)[None]

    def _sample_at(self, ids: Tensor, probs: Tensor, children: int) -> tuple[Tensor, Tensor]:
        count = min(children, len(ids))
        left, tokens, log_probs = probs.clone(), [], []
        for _ in range(count):
            if left.sum() <= 0:
                tokens.append(ids[0])
                log_probs.append(torch.tensor(float("-inf"), dtype=probs.dtype))
                continue
            index = self.chooser.choose((left / left.sum()).tolist())
            tokens.append(ids[index])
            log_probs.append(probs[index].log())
            left[index] = 0
        return torch.stack(tokens), torch.stack(log_probs)


Tamper = Callable[[DraftTree], DraftTree]
# Returns the exact distribution of the tokens that a decoding step emits for a given tree.
Acceptance = Callable[[Tables, Sampling, Prefix, DraftTree], dict[Prefix, float]]


def logits_in_tree(tables: Tables, prefix: Prefix, tree: SequenceTree) -> Tensor:
    """Return the target's logits after the root and after each node, [queries, vocab]."""
    nodes = range(ROOT, len(tree.token_ids))
    paths = [tuple(tree.token_ids[index] for index in tree.path(node)) for node in nodes]
    return torch.stack([tables.target_logits(prefix + path) for path in paths])


def one_by_one(
    tables: Tables, sampling: Sampling, prefix: Prefix, tree: DraftTree
) -> dict[Prefix, float]:
    """Return the exact distribution of the tokens that `accept_path` emits for a given tree."""
    own = tree.sequence_tree()
    logits = logits_in_tree(tables, prefix, own)
    processed = ProcessedDistribution(logits, list(prefix), own, sampling)
    probs = cache(processed.__call__)

    def experiment(chooser: Chooser) -> Prefix:
        path, next_probs = accept.accept_path(own, probs, chooser.accept)
        last = chooser.choose(next_probs.tolist())
        return (*(own.token_ids[node] for node in path), last)

    return distribution_of(experiment)


def one_step(
    tables: Tables,
    shape: TreeShape,
    sampling: Sampling,
    prefix: Prefix,
    tamper: Tamper = lambda tree: tree,
    acceptance: Acceptance = one_by_one,
) -> dict[Prefix, float]:
    """Return the exact distribution of a decoding step's tokens; `tamper` changes its trees."""

    def drafted(chooser: Chooser) -> int:
        builder = BranchingBuilder(shape, BatchSampling([sampling]))
        if sampling.grammar is not None:  # as `Context` does
            sampling.grammar.set_root(list(prefix))
            builder.grammars = [sampling.grammar]
        builder.chooser = chooser
        trees.append(builder.build(tables.source(prefix), torch.tensor([len(prefix)])))
        return len(trees) - 1

    trees: list[DraftTree] = []
    total: dict[Prefix, float] = {}
    for index, probability in distribution_of(drafted).items():
        for emitted, share in acceptance(tables, sampling, prefix, tamper(trees[index])).items():
            total[emitted] = total.get(emitted, 0.0) + probability * share
    return total


def target_probs(tables: Tables, sampling: Sampling, prefix: Prefix) -> Tensor:
    """Return the target's processed distribution after a prefix."""
    tree = DraftTree.empty(torch.tensor([len(prefix)])).sequence_tree()
    logits = tables.target_logits(prefix)[None]
    return ProcessedDistribution(logits, list(prefix), tree, sampling)(ROOT)


def two_step_error(
    tables: Tables,
    shape: TreeShape,
    sampling: Sampling,
    tamper: Tamper = lambda tree: tree,
    length: int = 3,
    acceptance: Acceptance = one_by_one,
) -> float:
    """Return the error of two decoding steps; `tamper` changes their trees."""
    return error_of_two_steps(
        tables,
        sampling,
        lambda prefix: one_step(tables, shape, sampling, prefix, tamper, acceptance),
        length,
    )


def error_of_two_steps(
    tables: Tables,
    sampling: Sampling,
    step: Callable[[Prefix], dict[Prefix, float]],
    length: int = 3,
) -> float:
    """Return the total variation between the distributions of two steps and of the target.

    The distributions are those of the first `length` tokens. If two steps emit fewer tokens, the
    target's distribution continues them.

    Args:
        step: function from a prefix to the exact distribution of the tokens that a step emits.
    """
    start: Prefix = (0, 1)
    second = {}
    got: dict[Prefix, float] = {}
    for first, probability in step(start).items():
        if len(first) >= length:
            _continue(tables, sampling, start, first, probability, length, got)
            continue
        if first not in second:
            second[first] = step(start + first)
        for then, conditional in second[first].items():
            _continue(tables, sampling, start, first + then, probability * conditional, length, got)
    expected: dict[Prefix, float] = {}
    _continue(tables, sampling, start, (), 1.0, length, expected)
    keys = itertools.chain(got, expected)
    return 0.5 * sum(abs(got.get(key, 0.0) - expected.get(key, 0.0)) for key in set(keys))


def _continue(
    tables: Tables,
    sampling: Sampling,
    start: Prefix,
    emitted: Prefix,
    probability: float,
    length: int,
    into: dict[Prefix, float],
) -> None:
    """Add the target's continuations of `emitted` to `length` tokens, with their probabilities."""
    if len(emitted) >= length:
        into[emitted[:length]] = into.get(emitted[:length], 0.0) + probability
        return
    for token, share in enumerate(target_probs(tables, sampling, start + emitted).tolist()):
        if share > 0:
            _continue(tables, sampling, start, (*emitted, token), probability * share, length, into)


def no_processors(do_sample: bool = True) -> Sampling:
    """Return sampling options without logits processors."""
    return Sampling(LogitsProcessorList(), do_sample)
