"""Drafting of the next tree while the target verifies; an experiment, for one sequence at a time.

The outcome of a decoding step is guessed: the best path of its tree is accepted, and the drafter's
most likely token follows. The tree below is drafted meanwhile, with the random numbers of the next
step. If the guess was right, it is the next step's tree, and is kept as a whole. Otherwise, the
session forgets all of it, and the tree is drafted as usual. The tree does not depend on the random
numbers by which candidates are accepted, so the output follows the same distribution; in float64,
the same seed gives the same tokens. This is a form of asynchronous drafting (AMUSD, arXiv
2410.17375) in which nothing depends on timing.

Drafter and target are on the same device, and only threads of a CPU compute at the same time: on a
GPU, the work of both threads is queued in the same stream.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from inference.autotune.policy import RequestGroup
from inference.decoder import SpeculativeDecoder
from inference.draft_tree import ROOT, DraftTree, SequenceTree
from inference.engine.context import Context
from inference.engine.loop import DecodeRun
from inference.engine.policy import AlwaysDraft
from inference.engine.request import SequenceState
from inference.protocol import Budget, Committed
from inference.sampling.random_numbers import StepRandom
from jakiro.errors import ConfigError


class AheadDecoder(SpeculativeDecoder):
    """A decoder that drafts the next tree in a thread while the target verifies the current one.

    Several sequences that are decoded together, conversations, and texts with a grammar are decoded
    as usual. Arguments are those of `SpeculativeDecoder`, with `tree="fixed"`.

    Example:
        decoder = AheadDecoder(target, SmallLMDrafter(small, target), tree="fixed")
        output = decoder.generate([1, 2, 3], max_new_tokens=8, temperature=0)
        print(decoder.num_right / decoder.num_guesses)
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.num_guesses = self.num_right = 0
        drafter = self.drafter
        if drafter is None or drafter.needs or drafter.request_counter is not None:
            raise ConfigError(
                "only a drafter that reads tokens alone and does not learn, such as a small model, "
                "can draft ahead"
            )
        if self.is_captured or not isinstance(self.policy, AlwaysDraft):
            raise ConfigError('drafting ahead needs tree="fixed" and captured=False')
        self.target.need_trees("drafting ahead")

    def _run(self, group: RequestGroup, log_probs: bool = False) -> DecodeRun:
        return AheadRun(self, requests=group.requests, **self._parts(group, log_probs))


class _Ahead(NamedTuple):
    token_ids: list[int]  # all tokens of the sequence, if the guess is right
    known: int  # length of the session before the guess
    tree: DraftTree


class AheadRun(DecodeRun):
    """A run that drafts ahead while it has a single sequence."""

    def __init__(self, decoder: AheadDecoder, **parts: Any) -> None:
        super().__init__(**parts)
        self._decoder = decoder
        self._budget: Budget | None = None
        self._ahead: _Ahead | None = None
        self._worker = ThreadPoolExecutor(1)

    def append(self, context: Context, sequences: Sequence[SequenceState]) -> None:
        self._forget()
        super().append(context, sequences)

    def close(self) -> None:
        super().close()
        self._worker.shutdown()

    def _proposed(
        self, token_ids: Sequence[list[int]], budget: Budget, random: StepRandom
    ) -> DraftTree:
        """Return the tree that was drafted ahead if the guess was right."""
        ahead, self._budget = self._ahead, budget
        if ahead is not None and list(token_ids) == [ahead.token_ids]:
            self._ahead = None
            self._decoder.num_right += 1
            return ahead.tree
        self._forget()
        return super()._proposed(token_ids, budget, random)

    def _verify(self, tree: DraftTree) -> Float[Tensor, "batch queries vocab"]:
        is_alone = len(self.live) == 1 and self.live[0].request.sampling.grammar is None
        if not is_alone or self._budget is None or not tree.num_nodes:
            return super()._verify(tree)
        drafted = self._worker.submit(self._drafted, tree.sequence_tree())
        try:
            return self._target_logits(tree)
        finally:
            self._ahead = drafted.result()

    def _target_logits(self, tree: DraftTree) -> Float[Tensor, "batch queries vocab"]:
        return super()._verify(tree)

    @torch.inference_mode()
    def _drafted(self, tree: SequenceTree) -> _Ahead | None:
        """Return the tree below the guessed outcome of a tree; None if it has no path."""
        (state,), session = self.live, self.context.session
        path = [tree.token_ids[node] for node in tree.best_path()]
        if not path or session is None or self._budget is None:
            return None
        length = len(state.token_ids) - 1
        key = state.request.sampling.stream_key(state.num_steps + 1)
        random = StepRandom([key], self.target.device, self._num_uniforms)
        guessed = [*state.token_ids, *path]
        session.advance(self._committed(guessed, length))
        last = session.propose(Budget(1, 1), random).sequence_tree()
        if not last.children.get(ROOT):
            session.rollback(length)
            return None
        guessed.append(_likeliest(last))
        session.advance(self._committed(guessed, len(guessed) - 2))
        self._decoder.num_guesses += 1
        return _Ahead(guessed, length, session.propose(self._budget, random))

    def _committed(self, token_ids: list[int], start: int) -> Committed:
        """Return the tokens from `start` to the last one, which is the root."""
        return Committed.of([token_ids], [start], [len(token_ids) - 1], self.target.device)

    def _forget(self) -> None:
        """Remove a wrong guess from the session, which may have the right length by chance."""
        if self._ahead is not None and self.context.session is not None:
            self.context.session.rollback(self._ahead.known)
        self._ahead = None


def _likeliest(tree: SequenceTree) -> int:
    """Return the most likely token of a tree with one candidate, whatever was sampled."""
    if ROOT in tree.sampled:
        ids, probs = tree.draft_distribution(ROOT)
        return int(ids[probs.argmax()])
    return tree.token_ids[tree.children[ROOT][0]]
