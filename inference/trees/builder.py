"""Growth of draft trees, level by level, from predicted distributions.

Here is an example with one sequence, two children under each expanded node, and two nodes expanded
on each level:

    level 1    candidates       0      1             children of ROOT
               expanded         0      1             the frontier: token_ids, origin [0, 0]
    level 2    candidates     2   3  4   5           origin [0, 0, 1, 1], parent [0, 0, 1, 1]
               expanded           3  4               the frontier: token_ids, origin [0, 1]
    level 3    candidates       6   7   8   9        origin [0, 0, 1, 1], parent [3, 3, 4, 4]

A deterministic tree keeps the best candidates of all levels. A sampled tree keeps all candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from inference.draft_tree import ROOT, CandidateKind, DraftTree, SparseDistribution
from inference.sampling.batch import BatchSampling
from inference.sampling.grammar import GrammarProcessor
from inference.sampling.random_numbers import StepRandom
from inference.trees.shape import TreeShape

# Tokens from the root to each node of the frontier, for each sequence; empty without grammars.
Paths: TypeAlias = list[list[list[int]]]

DISTRIBUTION_SIZE = 256  # number of most likely tokens from which children are sampled


class TreeLevel(NamedTuple):
    """The nodes of one depth: all candidates, or the frontier of nodes that get children."""

    token_ids: Int[Tensor, "batch n"]
    origin: Int[Tensor, "batch n"]  # index of each node's parent in the frontier one level above
    proposer_id: Int[Tensor, "batch n"]
    score: Float[Tensor, "batch n"]  # cumulative draft log-probability
    parents: Int[Tensor, "batch f"]  # tree index of each node of the frontier above, or ROOT
    columns: Int[Tensor, "batch n"]  # index of each token among the tokens that may be drafted
    draft_probs: SparseDistribution | None = (
        None  # distributions below `parents`; None if nothing is sampled
    )

    @property
    def children(self) -> int:
        """The number of candidates under each node of the frontier above."""
        return self.score.shape[1] // self.parents.shape[1]

    @property
    def parent(self) -> Int[Tensor, "batch n"]:
        """The tree index of each node's parent, or ROOT."""
        return self.parents.gather(1, self.origin)

    def best(self, count: int) -> tuple["TreeLevel", Int[Tensor, "batch f"]]:
        """Return a frontier of the `count` best candidates, and the indices of these candidates."""
        score, indices = self.score.topk(min(count, self.score.shape[1]), dim=1)
        frontier = self._replace(
            token_ids=self.token_ids.gather(1, indices),
            origin=indices // self.children,
            proposer_id=self.proposer_id.gather(1, indices),
            score=score,
            columns=self.columns.gather(1, indices),
        )
        return frontier, indices


def assemble(
    levels: list[TreeLevel], shape: TreeShape, base_length: Int[Tensor, " batch"]
) -> DraftTree:
    """Return the trees that consist of the given levels; parents come before their children.

    A sampled tree contains all candidates. A deterministic tree contains the `shape.num_nodes`
    candidates with the highest scores.
    """
    score = torch.cat([level.score for level in levels], dim=1)
    score = score.masked_fill(score.isnan(), -torch.inf)  # NaN would rank first
    columns = ([level.token_ids, level.parent, level.proposer_id] for level in levels)
    fields = torch.cat([torch.stack(column, dim=1) for column in columns], dim=2)
    counts = tuple((level.score.shape[1], level.children) for level in levels)
    depth, rank = (column.expand_as(score) for column in _layout(counts, score.device))
    if not shape.sampled:
        order, rank = _best(score, shape.num_nodes)
        depth, score = depth.gather(1, order), score.gather(1, order)
        fields = _reordered(fields, order)
    token_ids, parent, proposer_id = fields.unbind(dim=1)
    kind = CandidateKind.SAMPLED if shape.sampled else CandidateKind.DETERMINISTIC
    return DraftTree(
        token_ids=token_ids,
        parent=parent,
        depth=depth,
        score=score,
        kind=torch.full_like(parent, int(kind)),
        rank=rank,
        proposer_id=proposer_id,
        is_valid=~score.isneginf(),
        base_length=base_length,
        max_depth=len(levels),
        max_siblings=max(level.children for level in levels),
        draft_probs=_recorded(levels, score.shape[1]) if shape.sampled else None,
    )


@cache  # recorded steps refer to these tensors
def _layout(
    counts: tuple[tuple[int, int], ...], device: torch.device
) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
    """Return the depth of each candidate, and its index among its siblings."""
    depth = [level for level, (size, _) in enumerate(counts, start=1) for _ in range(size)]
    rank = [index % children for size, children in counts for index in range(size)]
    return torch.tensor(depth, device=device), torch.tensor(rank, device=device)


@cache  # recorded steps refer to these tensors
def _origins(expanded: int, children: int, device: torch.device) -> Int[Tensor, "1 n"]:
    """Return the index of each candidate's parent in the frontier above."""
    return torch.arange(expanded, device=device).repeat_interleave(children)[None]


def _best(score: Tensor, count: int) -> tuple[Int[Tensor, "batch kept"], Int[Tensor, "batch kept"]]:
    """Return the indices of the `count` best candidates in ascending order, and their ranks.

    Candidates are ranked by score. The parent of a kept candidate is kept as well, because the
    parent comes earlier in the tree and never has a lower score, so a stable sort ranks the parent
    first even if the scores are equal.
    """
    ranked = score.sort(dim=1, descending=True, stable=True).indices[:, :count]
    kept = ranked.sort(dim=1)
    return kept.values, kept.indices


def _reordered(fields: Int[Tensor, "batch 3 n"], order: Tensor) -> Int[Tensor, "batch 3 kept"]:
    """Return the fields of the kept candidates, with parents as indices among these candidates."""
    new_index = torch.zeros_like(fields[:, 0])
    ascending = torch.arange(order.shape[1], device=order.device).expand_as(order)
    new_index.scatter_(1, order, ascending)
    kept = fields.gather(2, order[:, None].expand(-1, 3, -1))
    parent = kept[:, 1]
    kept[:, 1] = torch.where(parent == ROOT, ROOT, new_index.gather(1, parent.clamp(min=0)))
    return kept


def _recorded(levels: list[TreeLevel], num_nodes: int) -> SparseDistribution:
    """Return the draft distributions below ROOT and all nodes; zeros for nodes without children."""
    first = levels[0].draft_probs
    assert first is not None
    shape = (first.ids.shape[0], num_nodes + 1, first.ids.shape[2])
    ids, probs = first.ids.new_zeros(shape), first.probs.new_zeros(shape)
    for level in levels:
        assert level.draft_probs is not None
        index = (level.parents + 1)[:, :, None].expand_as(level.draft_probs.ids)
        ids.scatter_(1, index, level.draft_probs.ids)
        probs.scatter_(1, index, level.draft_probs.probs)
    return SparseDistribution(ids, probs)


@runtime_checkable
class JointPredictor(Protocol):
    """A source of draft distributions: a drafter's passes over a tree, or a table in a test."""

    draft_ids: Int[Tensor, " drafted"] | None

    def joint(
        self, depth: int, frontier: TreeLevel | None
    ) -> Float[Tensor, "batch f comp drafted"]:
        """Return `log(w_e p_e(t))` for every token t that may be drafted below each node.

        Here p_e is the draft distribution of expert e, and w_e is the weight of this expert.
        """
        ...


@dataclass
class TreeBuilder:
    """Builds the trees of one decoding step.

    If a draft distribution is not finite, no candidates are taken from this distribution.
    """

    shape: TreeShape
    sampling: BatchSampling
    random: StepRandom = field(default_factory=StepRandom)
    grammars: Sequence[GrammarProcessor | None] = ()  # of each sequence; empty if none has one

    def build(self, source: JointPredictor, base_length: Int[Tensor, " batch"]) -> DraftTree:
        levels: list[TreeLevel] = []
        frontier: TreeLevel | None = None
        parents = torch.full_like(base_length, ROOT)[:, None]
        score = torch.zeros(parents.shape, device=parents.device)
        num_nodes = 0  # number of nodes in all levels so far
        noise: list[Tensor] = []
        paths: Paths = [[[]] for _ in self.grammars]
        for depth in range(1, self.shape.depth + 1):
            joint = source.joint(depth, frontier)
            if self.shape.sampled and depth == 1:
                noise = self._noise(joint.shape[-1])
            own_noise = noise[depth - 1] if noise else None
            level = self._grow(joint, source.draft_ids, parents, score, own_noise, paths)
            levels.append(level)
            if depth == self.shape.depth:
                break
            frontier, indices = level.best(self.shape.breadth)
            parents, score = indices + num_nodes, frontier.score
            num_nodes += level.score.shape[1]
            paths = _extended(paths, frontier) if paths else []
        return assemble(levels, self.shape, base_length)

    def _noise(self, vocab: int) -> list[Float[Tensor, "batch f m"]]:
        """Return the noise of all levels, which is copied to the device at once."""
        size = min(DISTRIBUTION_SIZE, vocab)
        shapes = [(1, size)]
        for _ in range(1, self.shape.depth):
            candidates = shapes[-1][0] * min(self.shape.children, size)
            shapes.append((min(self.shape.breadth, candidates), size))
        return self.random.exponentials(shapes)

    def _grow(
        self,
        joint: Tensor,
        draft_ids: Tensor | None,
        parents: Tensor,
        score: Tensor,
        noise: Tensor | None,
        paths: Paths,
    ) -> TreeLevel:
        """Return the children of every parent: the most likely tokens, or sampled ones.

        Children are sampled if there is `noise`.
        """
        # Adding in pairs is several times faster than logsumexp over a short axis.
        log_probs = reduce(torch.logaddexp, joint.unbind(dim=2))
        if paths:
            log_probs = self._masked(log_probs, draft_ids, paths)
        likeliest = self._likeliest(log_probs)
        draft_probs = None
        if noise is None:
            columns, child_log_probs = likeliest
        else:
            draft_probs = _distribution(*likeliest)
            if self.sampling.quantizes_drafts:
                draft_probs = replace(draft_probs, probs=_quantized(draft_probs.probs))
            columns, child_log_probs = self._sample(draft_probs, noise, self.shape.children)
            draft_probs = replace(draft_probs, ids=_tokens(draft_probs.ids, draft_ids))
        at_token = joint.gather(3, columns[:, :, None].expand(-1, -1, joint.shape[2], -1))
        origin = _origins(*columns.shape[1:], columns.device)
        return TreeLevel(
            token_ids=_tokens(columns, draft_ids).flatten(1),
            origin=origin.expand(len(columns), -1),
            proposer_id=at_token.argmax(dim=2).flatten(1),
            # Rounding may raise a probability above 1; the child would then outrank its parent.
            score=(score[:, :, None] + child_log_probs.clamp(max=0)).flatten(1),
            parents=parents,
            columns=columns.flatten(1),
            draft_probs=draft_probs,
        )

    def _masked(
        self, log_probs: Tensor, draft_ids: Tensor | None, paths: Paths
    ) -> Float[Tensor, "batch f drafted"]:
        """Return the distributions without the tokens that grammars forbid, renormalized.

        Where every token is forbidden, and where a text is complete, no value is finite.
        """
        size = log_probs.shape[-1] if draft_ids is None else int(draft_ids.max()) + 1
        log_probs = log_probs.clone()
        for index, grammar in enumerate(self.grammars):
            if grammar is None:
                continue
            rows = np.stack([grammar.below_root(path, size) for path in paths[index]])
            allowed = torch.from_numpy(rows).to(log_probs.device)
            allowed = allowed if draft_ids is None else allowed[:, draft_ids]
            own = log_probs[index].masked_fill_(~allowed, -torch.inf)
            if not self.shape.sampled:  # otherwise, the likeliest tokens are normalized later
                own -= own.logsumexp(dim=-1, keepdim=True)
        return log_probs

    def _likeliest(self, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the likeliest tokens, as columns, and their processed log-probabilities.

        These are the support of the distribution that children are sampled from, or the children
        themselves. Processors get only the `DISTRIBUTION_SIZE` likeliest tokens, which take little
        time to sort.
        """
        count = self.shape.children
        if not self.shape.sampled and not self.sampling.processes_drafts:
            return _top(log_probs, count)
        columns, best = _top(log_probs, DISTRIBUTION_SIZE)
        processed = self.sampling.processed_draft(best)
        if self.shape.sampled:
            return columns, processed
        best, order = processed.topk(min(count, processed.shape[2]), dim=-1)
        return columns.gather(2, order), best

    def _sample(
        self, draft_probs: SparseDistribution, noise: Float[Tensor, "batch f m"], count: int
    ) -> tuple[Tensor, Tensor]:
        """Return children sampled without replacement by Gumbel-top-k, in the order of sampling."""
        log_probs = draft_probs.probs.log()
        keys = log_probs - noise.to(log_probs).log()
        keys, indices = keys.topk(min(count, draft_probs.ids.shape[2]), dim=-1)
        sampled = torch.where(keys.isneginf(), keys, log_probs.gather(2, indices))
        return draft_probs.ids.gather(2, indices), sampled


def _extended(paths: Paths, frontier: TreeLevel) -> Paths:
    """Return the paths to the nodes of a frontier, given those to the frontier above."""
    tokens, origins = frontier.token_ids.tolist(), frontier.origin.tolist()
    return [
        [[*above[origin], token] for token, origin in zip(*nodes, strict=True)]
        for above, *nodes in zip(paths, tokens, origins, strict=True)
    ]


def _top(log_probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the most likely tokens and their log-probabilities.

    If a distribution is not finite, all its log-probabilities are -inf.
    """
    best, token_ids = log_probs.topk(min(count, log_probs.shape[-1]), dim=-1)
    # NaN ranks first, so the first value is not finite if there is a NaN or no possible token.
    is_distribution = best[..., :1].isfinite()
    return token_ids, best.masked_fill(~is_distribution, -torch.inf)


def _distribution(columns: Tensor, log_probs: Tensor) -> SparseDistribution:
    # If all values are -inf, their softmax is NaN, which is replaced by 0.
    return SparseDistribution(columns, log_probs.softmax(dim=-1).nan_to_num(nan=0.0))


def _quantized(probs: Tensor) -> Float[Tensor, "batch parents m"]:
    """Return probabilities, rounded to integer weights; zeros where nothing can be sampled."""
    # Only drafts for another machine are rounded.
    from inference.sampling.integer_distribution import probabilities, quantized

    exact = probs.double().cpu().numpy()
    is_empty = exact.sum(axis=-1, keepdims=True) == 0
    rounded = probabilities(quantized(np.where(is_empty, 1.0, exact)))
    return torch.from_numpy(np.where(is_empty, 0.0, rounded)).to(probs)


def _tokens(columns: Tensor, draft_ids: Tensor | None) -> Int[Tensor, "*batch"]:
    """Return the token ids at these columns of a draft distribution."""
    return columns if draft_ids is None else draft_ids[columns]
