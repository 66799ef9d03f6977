"""Tau of several drafters on the same texts, which the target writes once.

A deterministic candidate depends only on the tokens before it, and is accepted exactly if it is the
token that the target selects there. The steps of a text therefore follow from the text itself: each
step accepts the path of its tree along which the text goes on. The target reads the whole text in
one pass, instead of a tree in each step, and several drafters can be compared on the same text,
also where tokens are sampled.

Sampled candidates are different: whether they are accepted also depends on the distribution from
which they were sampled, so a text does not determine its steps.
"""

from collections.abc import Sequence

import torch

from inference.benchmark.document import Continuation, Decoded
from inference.benchmark.methods import JakiroDecoding, Method, SamplingOptions
from inference.decoder import SpeculativeDecoder
from inference.engine.batch import remaining
from inference.engine.context import Context
from inference.engine.loop import DecodeRun
from inference.engine.policy import AlwaysDraft
from inference.engine.stats import DecodeStats
from inference.sampling.random_numbers import StepRandom
from jakiro.utils.devices import num_threads


class ReplayedDecoding(JakiroDecoding):
    """A method that gives the answers of `writer`, with the steps that a drafter would have taken.

    Args:
        written: answers of the writer, which all methods with this writer share.
    """

    def __init__(
        self,
        method: JakiroDecoding,
        name: str,
        writer: JakiroDecoding,
        written: dict[object, list[Continuation]],
    ) -> None:
        super().__init__(name, method.kind, method.decoder)
        self.family = method.name
        self._writer, self._written = writer, written

    def decode(self, prompts: list[list[int]], sampling: SamplingOptions, seed: int) -> Decoded:
        """Return the writer's answers, and the counts of the drafter's steps."""
        key = repr((prompts, sampling, seed))
        if key not in self._written:
            self._written[key] = self._writer.decode(prompts, sampling, seed).continuations
        answers = self._written[key]
        run = self.start(prompts, sampling, seed)
        with num_threads(self.decoder.threads):
            counts = replay(run, [answer.token_ids for answer in answers])
        continuations = [
            answer._replace(stats=stats) for answer, stats in zip(answers, counts, strict=True)
        ]
        return Decoded(continuations, {})


def replayed(methods: Sequence[Method], plain: SpeculativeDecoder) -> list[Method]:
    """Return methods that replay the texts of a decoder without drafts."""
    writer = JakiroDecoding("writer", "autoregressive", plain)
    written: dict[object, list[Continuation]] = {}
    return [
        ReplayedDecoding(method, f"{method.name} ({number})", writer, written)
        for number, method in enumerate(methods)
        if isinstance(method, JakiroDecoding)
    ]


@torch.inference_mode()
def replay(run: DecodeRun, answers: Sequence[Sequence[int]]) -> list[DecodeStats]:
    """Return the counts with which a run would produce given answers, up to rounding.

    Args:
        run: a run that has not started yet, and proposes a deterministic tree of one size in every
            step; it is closed afterwards.
        answers: tokens after the prompt of each request, at least one and at most as many as the
            request allows.
    """
    context = run.context
    try:
        texts = [
            [*state.token_ids, *answer]
            for state, answer in zip(run.sequences, answers, strict=True)
        ]
        starts = [len(state.token_ids) for state in run.sequences]
        _read(context, texts, starts)
        return _steps(run, texts, starts)
    finally:
        run.close()


def _read(context: Context, texts: Sequence[list[int]], starts: Sequence[int]) -> None:
    """Let the target read whole texts, and go back to the ends of the prompts."""
    longest, offset = max(map(len, texts)), 0
    while offset < longest:
        count = min(context.prefill_chunk, longest - offset)
        context.read(texts, offset, count)
        offset += count
    context.lengths = list(starts)


def _steps(run: DecodeRun, texts: list[list[int]], starts: Sequence[int]) -> list[DecodeStats]:
    """Propose trees along the texts, each below the token after those that are cached."""
    context, policy = run.context, run.policy
    assert isinstance(policy, AlwaysDraft)
    assert policy.budget is not None
    assert context.session is not None
    assert not context.session.is_sampled
    last = context.target.spec.max_position - 1
    stats = [DecodeStats(emitted=1) for _ in texts]
    live = list(range(len(texts)))
    lengths = list(starts)
    while True:
        pairs = zip(live, lengths, strict=True)
        kept = remaining([length + 1 < len(texts[index]) for index, length in pairs])
        if not kept:
            return stats
        if len(kept) < len(live):
            context.lengths = [len(texts[index]) for index in live]  # whole texts move
            context.select_sequences(kept)
            live = [live[index] for index in kept]
            lengths = [lengths[index] for index in kept]
        context.lengths = lengths
        begun = [texts[index][: length + 1] for index, length in zip(live, lengths, strict=True)]
        proposed = context.propose(begun, policy.budget, StepRandom()).limited(last)
        for row, tree in enumerate(proposed.to_host()):
            rest = texts[live[row]][lengths[row] + 1 :]
            path = tree.follow(rest)
            count = min(len(path) + 1, len(rest))
            stats[live[row]].count(tree, path, count)
            stats[live[row]].target_forwards += 1
            lengths[row] += count
