"""Drafting of the next tree while the target verifies; an experiment, for one sequence at a time.

The outcome of a decoding step is guessed: the best path of its tree is accepted, and the drafter's
most likely token follows. The tree below is drafted meanwhile, with the random numbers of the next
step. If the guess was right, it is the next step's tree, and is kept as a whole. Otherwise, the
session forgets all of it, and the tree is drafted as usual. The tree does not depend on the random
numbers by which candidates are accepted, so the output follows the same distribution; in float64,
the same seed gives the same tokens. This is a form of asynchronous drafting (AMUSD, arXiv
2410.17375) in which nothing depends on timing.

Drafter and target are on the same device, and only threads of a CPU compute at the same time: there
are no CUDA streams, and there is no second device.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from inference.autotune.policy import RequestGroup
from inference.decoder import SpeculativeDecoder
from inference.draft_tree import ROOT, DraftTree, SequenceTree
from inference.engine.context import Context
from inference.engine.loop import DecodeRun
from inference.engine.policy import AlwaysDraft
from inference.engine.request import OutputOptions, SequenceState
from inference.protocol import Budget, Committed, Drafter
from inference.sampling.random_numbers import StepRandom
from jakiro.errors import ConfigError
from jakiro.utils.devices import num_threads

Runner = Literal["inline", "thread"]


class AheadDecoder(SpeculativeDecoder):
    """A decoder that drafts the next tree while the target verifies the current one.

    Several sequences that are decoded together, and conversations, are decoded as usual.

    Args:
        runner: "thread" to draft in another thread while the target computes, on a CPU only.
            "inline" to draft after the target, which saves no time, on any device, to measure how
            often guesses are right.
        draft_threads: number of threads of the drafter while the target computes, for "thread";
            None for torch's current number.
        **options: as for `SpeculativeDecoder`, with `tree="fixed"`.

    Example:
        decoder = AheadDecoder(target, SmallLMDrafter(small, target), tree="fixed")
        output = decoder.generate([1, 2, 3], max_new_tokens=8, temperature=0)
        print(decoder.num_right / decoder.num_guesses)
    """

    def __init__(
        self,
        *args: Any,
        runner: Runner = "thread",
        draft_threads: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.runner, self.draft_threads = runner, draft_threads
        self.num_guesses = self.num_right = 0
        captured = self._pipelines is not None
        _check_usable(self.drafter, self.policy, runner, captured, self.target.device)

    def _run(self, group: RequestGroup, options: OutputOptions | None = None) -> DecodeRun:
        return AheadRun(self, requests=group.requests, **self._parts(group, options))


class _Ahead(NamedTuple):
    """A tree below guessed tokens."""

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
        self._worker = ThreadPoolExecutor(1) if decoder.runner == "thread" else None

    def append(self, context: Context, sequences: Sequence[SequenceState]) -> None:
        """Add sequences, after the session has forgotten a guess."""
        self._forget()
        super().append(context, sequences)

    def close(self) -> None:
        """Free the caches, as `DecodeRun` does, and end the thread."""
        super().close()
        if self._worker is not None:
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
        """Return the target's logits, and draft the next tree meanwhile."""
        if len(self.live) != 1 or self._budget is None or not tree.num_nodes:
            return super()._verify(tree)
        sequence_tree = (
            tree.sequence_tree()
        )  # before the target computes, because this waits for the device
        if self._worker is None:
            logits = self._target_logits(tree)
            self._ahead = self._drafted(sequence_tree)
            return logits
        drafted = self._worker.submit(self._drafted_in_thread, sequence_tree)
        try:
            return self._target_logits(tree)
        finally:
            self._ahead = drafted.result()

    def _target_logits(self, tree: DraftTree) -> Float[Tensor, "batch queries vocab"]:
        return super()._verify(tree)

    @torch.inference_mode()
    def _drafted_in_thread(self, tree: SequenceTree) -> _Ahead | None:
        with num_threads(self._decoder.draft_threads):
            return self._drafted(tree)

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
        session.advance(self._tokens(guessed, length))
        last = session.propose(Budget(1, 1), random).sequence_tree()
        if not last.children.get(ROOT):
            session.rollback(length)
            return None
        guessed.append(_likeliest(last))
        session.advance(self._tokens(guessed, len(guessed) - 2))
        self._decoder.num_guesses += 1
        return _Ahead(guessed, length, session.propose(self._budget, random))

    def _tokens(self, token_ids: list[int], start: int) -> Committed:
        """Return the tokens from `start` to the last one, which is the root."""
        end = len(token_ids) - 1

        def on_device(values: list[int] | list[list[int]]) -> Tensor:
            return torch.tensor(values, device=self.target.device)

        return Committed(
            base_length=(end,),
            num_verified=(end - start,),
            token_ids=on_device([token_ids[start:end]]),
            root=on_device([token_ids[end:]]),
            start=on_device([start]),
            end=on_device([end]),
            is_padded=False,
        )

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


def _check_usable(
    drafter: Drafter | None, policy: object, runner: str, captured: bool, device: torch.device
) -> None:
    is_adaptive = drafter is not None and drafter.request_counter is not None
    for is_usable, expected in (
        (
            drafter is not None and not drafter.needs and not is_adaptive,
            "a drafter that reads tokens alone and does not learn, such as a small model",
        ),
        (isinstance(policy, AlwaysDraft), 'tree="fixed"'),
        (not captured, "captured=False"),
        # On a GPU, the work of both threads is queued in the same stream.
        (runner == "inline" or device.type == "cpu", 'a target on a CPU, or runner="inline"'),
    ):
        if not is_usable:
            raise ConfigError(
                "trees cannot be drafted ahead with these arguments", expected=expected
            )
