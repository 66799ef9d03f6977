"""Random trees with candidates of both kinds, repeated tokens, and probabilities of zero."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import torch
from torch import Tensor

from inference.draft_tree import ROOT, CandidateKind, DraftTree, SparseDistribution

DEPTH = 4


@dataclass(frozen=True)
class RandomTrees:
    """Generator of trees of one sequence.

    Args:
        sampled_share: probability that a candidate is sampled.
    """

    nodes: int = 10
    vocab: int = 9
    drafted: int = 5
    sampled_share: float = 0.6

    def tree(self, seed: int) -> DraftTree:
        """Return a tree; parents have children of both kinds, in any order."""
        random = Random(seed)
        parents = self._parents(random)
        ids, probs = self._recorded(random)
        token_ids = [random.randrange(self.vocab) for _ in range(self.nodes)]
        rank, kind = [0] * self.nodes, [int(CandidateKind.DETERMINISTIC)] * self.nodes
        for siblings in _siblings(parents, random):
            chosen = [node for node in siblings if random.random() < self.sampled_share]
            cell = parents[siblings[0]] + 1
            tokens = _without_replacement(ids[cell], probs[cell], len(chosen), random)
            for order, (node, token) in enumerate(zip(chosen, tokens, strict=False)):
                token_ids[node], rank[node], kind[node] = token, order, CandidateKind.SAMPLED
        sizes = [len(siblings) for siblings in _siblings(parents, random)]
        ints = torch.tensor([token_ids, parents, kind, rank])[:, None]
        return DraftTree(
            token_ids=ints[0],
            parent=ints[1],
            depth=torch.tensor([[_depth(parents, node) for node in range(self.nodes)]]),
            score=torch.zeros(1, self.nodes),
            kind=ints[2],
            rank=ints[3],
            proposer_id=torch.zeros_like(ints[0]),
            is_valid=torch.tensor([[random.random() < 0.9 for _ in range(self.nodes)]]),
            base_length=torch.tensor([1]),
            max_depth=DEPTH,
            max_siblings=max(sizes),
            draft_probs=SparseDistribution(torch.tensor([ids]), torch.stack(probs)[None]),
        )

    def target_probs(self, seed: int) -> Tensor:
        """Return random distributions after ROOT and all nodes, in float64; a third are zeros."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.nodes + 1, self.vocab)
        logits = 2 * torch.randn(*shape, generator=generator, dtype=torch.float64)
        removed = torch.rand(*shape, generator=generator) < 1 / 3
        removed[:, 0] = False
        return logits.masked_fill(removed, -torch.inf).softmax(dim=-1)

    def _parents(self, random: Random) -> list[int]:
        parents: list[int] = []
        for node in range(self.nodes):
            possible = [
                parent
                for parent in range(ROOT, node)
                if parent == ROOT or _depth(parents, parent) < DEPTH
            ]
            parents.append(random.choice(possible))
        return parents

    def _recorded(self, random: Random) -> tuple[list[list[int]], list[Tensor]]:
        cells = range(self.nodes + 1)
        ids = [random.choices(range(self.vocab), k=self.drafted) for _ in cells]
        weights = [[random.random() * (random.random() < 0.8) for _ in own] for own in ids]
        probs = [torch.tensor([*own[:-1], own[-1] + 0.1], dtype=torch.float64) for own in weights]
        return ids, [own / own.sum() for own in probs]


def joined(trees: Sequence[DraftTree]) -> DraftTree:
    """Return the trees of several sequences as one batch."""

    def cat(name: str) -> Tensor:
        return torch.cat([getattr(tree, name) for tree in trees])

    names = ("token_ids", "parent", "depth", "score", "kind", "rank", "proposer_id")
    fields = {name: cat(name) for name in (*names, "is_valid", "base_length")}
    several = [tree.draft_probs for tree in trees if tree.draft_probs is not None]
    sparse = None
    if several:
        sparse = SparseDistribution(
            torch.cat([own.ids for own in several]), torch.cat([own.probs for own in several])
        )
    siblings = max(tree.max_siblings for tree in trees)
    return replace(trees[0], **fields, max_siblings=siblings, draft_probs=sparse)


def _depth(parents: list[int], node: int) -> int:
    return 1 if parents[node] == ROOT else 1 + _depth(parents, parents[node])


def _siblings(parents: list[int], random: Random) -> list[list[int]]:
    """Return the children of each parent, in random order."""
    found = defaultdict(list)
    for node, parent in enumerate(parents):
        found[parent].append(node)
    return [random.sample(nodes, len(nodes)) for nodes in found.values()]


def _without_replacement(ids: list[int], probs: Tensor, count: int, random: Random) -> list[int]:
    """Return up to `count` different ids, sampled in this order."""
    left: defaultdict[int, float] = defaultdict(float)
    for token, probability in zip(ids, probs.tolist(), strict=True):
        left[token] += probability
    tokens: list[int] = []
    while len(tokens) < count and sum(left.values()) > 0:
        tokens += random.choices(list(left), list(left.values()))
        del left[tokens[-1]]
    return tokens
