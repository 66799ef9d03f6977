"""Selection of a typical draft tree of a method, for the report."""

from collections.abc import Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from inference.benchmark.document import ExampleTree, TreeNode
from inference.benchmark.methods import OwnDecoding, SamplingOptions
from inference.draft_tree import ROOT, SequenceTree
from inference.engine.policy import RunProgress, StepPolicy
from inference.protocol import Budget

CONTEXT_TOKENS = 64  # tokens shown before the tree


class _Step(NamedTuple):
    """A decoding step: the verified tree, the accepted path, and the target's next token."""

    tree: SequenceTree
    path: list[int]
    root: int  # index of the root among all tokens of the sequence
    next_token: int


class _RecordingPolicy:
    """A wrapper of a policy that keeps the last decoding step's tree and accepted path."""

    def __init__(self, policy: StepPolicy) -> None:
        self._policy = policy
        self.last: tuple[SequenceTree, list[int]] | None = None

    @property
    def autoregressive_seconds(self) -> float | None:
        """The seconds that the wrapped policy estimates."""
        return self._policy.autoregressive_seconds

    @property
    def threads(self) -> int | None:
        """The number of threads that the wrapped policy selects."""
        return self._policy.threads

    def next_budget(self, progress: RunProgress) -> Budget | None:
        """Return the budget of the wrapped policy.

        Args:
            progress: progress of the run.
        """
        return self._policy.next_budget(progress)

    def learn(
        self,
        trees: Sequence[SequenceTree],
        paths: Sequence[list[int]],
        seconds: float | None,
        budget: Budget | None,
    ) -> None:
        """Keep the first sequence's tree and path, and notify the wrapped policy."""
        self.last = trees[0], paths[0]
        self._policy.learn(trees, paths, seconds, budget)


def example_tree(
    method: OwnDecoding,
    prompt: list[int],
    sampling: SamplingOptions,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
) -> ExampleTree | None:
    """Return the tree whose number of accepted drafts is closest to the mean.

    Trees without an accepted draft are left out if there are others. The result is None if the
    method drafts no trees.

    Args:
        method: drafting method.
        prompt: token ids of the prompt to continue.
        sampling: sampling options.
        seed: seed of all random numbers.
        tokenizer: the target's tokenizer, which decodes the tokens shown.
    """
    token_ids, steps = _decoded(method, prompt, sampling, seed)
    if not steps:
        return None
    mean = sum(len(step.path) for step in steps) / len(steps)
    shown = [step for step in steps if step.path] or steps
    typical = min(shown, key=lambda step: abs(len(step.path) - mean))
    context = token_ids[max(0, typical.root - CONTEXT_TOKENS) : typical.root]

    def text(ids: list[int]) -> str:
        return str(tokenizer.decode(ids))

    return ExampleTree(
        method=method.name,
        temperature=sampling.temperature,
        context=text(context),
        root=text([token_ids[typical.root]]),
        nodes=_nodes(typical, tokenizer),
        next_token=text([typical.next_token]),
    )


def _decoded(
    method: OwnDecoding, prompt: list[int], sampling: SamplingOptions, seed: int
) -> tuple[list[int], list[_Step]]:
    run = method.start([prompt], sampling, seed)
    policy = run.policy = _RecordingPolicy(run.policy)
    steps: list[_Step] = []
    for (tokens,) in run:
        if policy.last is not None and policy.last[0].children:
            tree, path = policy.last
            root = len(run.token_ids) - len(tokens.token_ids) - 1
            # A step in which the end of the request cuts off tokens is left out.
            if len(tokens.token_ids) == len(path) + 1:
                steps.append(_Step(tree, path, root, tokens.token_ids[-1]))
        policy.last = None
    return run.token_ids, steps


def _nodes(step: _Step, tokenizer: PreTrainedTokenizerBase) -> tuple[TreeNode, ...]:
    tree = step.tree
    valid = sorted(node for siblings in tree.children.values() for node in siblings)
    index_of = {ROOT: ROOT} | {node: index for index, node in enumerate(valid)}
    return tuple(
        TreeNode(
            token=str(tokenizer.decode([tree.token_ids[node]])),
            parent=index_of[tree.parent[node]],
            depth=tree.depth[node],
            expert=tree.proposer_id[node],
            accepted=node in step.path,
        )
        for node in valid
    )
