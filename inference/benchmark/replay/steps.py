"""Replay: the decoding steps in which a drafter's trees would have produced a known text.

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

from inference.engine.batch import remaining
from inference.engine.context import Context
from inference.engine.loop import DecodeRun
from inference.engine.policy import AlwaysDraft
from inference.engine.stats import DecodeStats
from inference.protocol import AdaptiveSession
from inference.sampling.random_numbers import StepRandom
from jakiro.errors import ConfigError


@torch.inference_mode()
def replay(run: DecodeRun, answers: Sequence[Sequence[int]]) -> list[DecodeStats]:
    """Return the counts with which a run would produce given answers, up to rounding.

    Args:
        run: a run that has not started yet, and drafts in every step; it is closed afterwards.
        answers: tokens after the prompt of each request, at least one and at most as many as the
            request allows.
    """
    context = run.context
    try:
        _require_replayable(run)
        texts = [
            [*state.token_ids, *answer]
            for state, answer in zip(run.sequences, answers, strict=True)
        ]
        starts = [len(state.token_ids) for state in run.sequences]
        _read(context, texts, starts)
        return _steps(run, texts, starts)
    finally:
        run.close()


def _require_replayable(run: DecodeRun) -> None:
    session = run.context.session
    assert session is not None, "there is nothing to replay without a drafter"
    faults = {
        "samples its candidates": session.is_sampled,
        "learns from decoding steps": isinstance(session, AdaptiveSession),
        "chooses the sizes of its trees": not isinstance(run.policy, AlwaysDraft),
    }
    for fault, is_present in faults.items():
        if is_present:
            raise ConfigError(
                "the steps of a text cannot be replayed with this drafter",
                expected="a drafter whose trees depend only on the tokens before them",
                got=f"a drafter that {fault}",
                remedy="decode the prompts instead (`jakiro bench`)",
            )


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
            live = [live[own] for own in kept]
            lengths = [lengths[own] for own in kept]
        context.lengths = lengths
        known = [texts[index][: length + 1] for index, length in zip(live, lengths, strict=True)]
        proposed = context.propose(known, policy.budget, StepRandom()).limited(last)
        for own, tree in enumerate(proposed.to_host()[0]):
            rest = texts[live[own]][lengths[own] + 1 :]
            path = tree.follow(rest)
            count = min(len(path) + 1, len(rest))
            stats[live[own]].count(tree, path, count)
            stats[live[own]].target_forwards += 1
            lengths[own] += count
