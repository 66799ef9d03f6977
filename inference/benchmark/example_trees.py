"""One typical draft tree of a method, to be looked at."""

from collections.abc import Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from inference.benchmark.document import ExampleTree, TreeNode
from inference.benchmark.methods import OwnDecoding, SamplingOptions
from inference.draft_tree import ROOT, SequenceTree
from inference.engine.policy import StepPolicy
from inference.protocol import Budget

CONTEXT_TOKENS = 64  # shown before the tree


class _Step(NamedTuple):
    """A verified tree, and where it grew."""

    tree: SequenceTree
    path: list[int]
    root: int  # index of its root among the tokens
    next_token: int


class _Watched:
    """A policy that remembers what became of each round."""

    def __init__(self, policy: StepPolicy) -> None:
        self._policy = policy
        self.last: tuple[SequenceTree, list[int]] | None = None

    def next_budget(self) -> Budget | None:
        """Decide as the policy does."""
        return self._policy.next_budget()

    def learn(
        self, trees: Sequence[SequenceTree], paths: Sequence[list[int]], seconds: float
    ) -> None:
        """Pass on, and remember."""
        self.last = trees[0], paths[0]
        self._policy.learn(trees, paths, seconds)


def example_tree(
    method: OwnDecoding,
    prompt: list[int],
    sampling: SamplingOptions,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
) -> ExampleTree | None:
    """Return a round's tree of which as much was accepted as is typical; None if none was drafted.

    Args:
        method: drafts.
        prompt: to be continued.
        law: how tokens are chosen.
        seed: of the draws.
        tokenizer: to show tokens with.
    """
    token_ids, steps = _decoded(method, prompt, sampling, seed)
    if not steps:
        return None
    mean = sum(len(one.path) for one in steps) / len(steps)
    chosen = min(steps, key=lambda one: abs(len(one.path) - mean))
    context = token_ids[max(0, chosen.root - CONTEXT_TOKENS) : chosen.root]

    def text(ids: list[int]) -> str:
        return str(tokenizer.decode(ids))

    return ExampleTree(
        method=method.name,
        temperature=sampling.temperature,
        context=text(context),
        root=text([token_ids[chosen.root]]),
        nodes=_nodes(chosen, tokenizer),
        next_token=text([chosen.next_token]),
    )


def _decoded(
    method: OwnDecoding, prompt: list[int], sampling: SamplingOptions, seed: int
) -> tuple[list[int], list[_Step]]:
    run = method.start([prompt], sampling, seed)
    watched = run.policy = _Watched(run.policy)
    steps: list[_Step] = []
    for (one,) in run:
        if watched.last is not None and watched.last[0].children:
            row, path = watched.last
            root = len(run.token_ids) - len(one.token_ids) - 1
            if len(one.token_ids) == len(path) + 1:  # not cut off by the end of the request
                steps.append(_Step(row, path, root, one.token_ids[-1]))
        watched.last = None
    return run.token_ids, steps


def _nodes(shown: _Step, tokenizer: PreTrainedTokenizerBase) -> tuple[TreeNode, ...]:
    row = shown.tree
    valid = sorted(node for siblings in row.children.values() for node in siblings)
    place = {ROOT: ROOT} | {node: index for index, node in enumerate(valid)}
    return tuple(
        TreeNode(
            token=str(tokenizer.decode([row.token_ids[node]])),
            parent=place[row.parent[node]],
            depth=row.depth[node],
            expert=row.proposer_id[node],
            accepted=node in shown.path,
        )
        for node in valid
    )
