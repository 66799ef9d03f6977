"""The comparison that a new version must pass: both drafters decode held-out prompts."""

from collections.abc import Sequence
from copy import deepcopy
from typing import NamedTuple

import numpy as np

from inference.adaptation.lesson import Passage, Recipe
from inference.benchmark.stats import Floats, student_quantile
from inference.decoder import SpeculativeDecoder
from inference.drafters.trained.drafter import TrainedDrafter
from jakiro.drafter import JakiroDrafter
from jakiro.target.adapter import TargetAdapter
from training.online.rows import cut

FEWEST = 4  # with fewer prompts, no version is ever better


class GateResult(NamedTuple):
    """The tau of two drafters on the same prompts.

    Attributes:
        before: tau of the drafter in use.
        after: tau of the new one.
        low: lower end of the 95% interval of after / before.
        older: after / before on the older half of the prompts.
    """

    before: float
    after: float
    low: float
    older: float

    def is_better(self, largest_loss: float) -> bool:
        """Return whether the new drafter is better beyond noise, without a loss on older prompts.

        Args:
            largest_loss: share of tau that the older half of the prompts may lose.
        """
        return self.low > 1 and self.older >= 1 - largest_loss


def compare_drafters(
    target: TargetAdapter,
    current: JakiroDrafter,
    candidate: JakiroDrafter,
    held_out: Sequence[Passage],
    recipe: Recipe,
) -> GateResult:
    """Compare two drafters by greedy decoding, alternately, of prompts that neither has learned.

    Both give the same texts, so only the numbers of decoding steps differ.

    Args:
        target: frozen target.
        current: drafter in use, which is not changed.
        candidate: new drafter, which is not changed.
        held_out: prompts with continuations, the oldest first.
        recipe: number of tokens to decode, and lengths.
    """
    decoders = [_decoder(target, drafter) for drafter in (current, candidate)]
    counts = np.zeros((2, 2, len(held_out)))  # drafter, tokens or steps, prompt
    for number, passage in enumerate(held_out):
        short = cut(passage, recipe.max_length)
        prompt = list(short.token_ids[: short.prompt_length])
        room = target.spec.max_position - len(prompt)
        for which, decoder in enumerate(decoders):
            new = min(recipe.compared_tokens, room)
            stats = decoder.generate(prompt, max_new_tokens=new, temperature=0).stats
            counts[which, :, number] = stats.decoded, stats.target_forwards
    return compare_counts(counts[0], counts[1])


def compare_counts(before: Floats, after: Floats) -> GateResult:
    """Return the result for numbers of tokens and decoding steps.

    The interval is a Student's t interval of the logarithm of the ratio; its variance is computed
    from the differences between the two drafters on each prompt (delta method).

    Args:
        before: tokens and steps of each prompt with the drafter in use [2, prompts].
        after: the same with the new drafter.
    """
    taus = [_tau(counts) for counts in (before, after)]
    ratio, count = taus[1] / taus[0], before.shape[1]
    if count < FEWEST:
        return GateResult(taus[0], taus[1], 0.0, 0.0)
    influence = _influence(after, taus[1]) - _influence(before, taus[0])
    reach = student_quantile(float(count - 1)) * influence.std(ddof=1) / np.sqrt(count)
    half = count // 2
    older = _tau(after[:, :half]) / _tau(before[:, :half])
    return GateResult(taus[0], taus[1], float(ratio * np.exp(-reach)), older)


def _tau(counts: Floats) -> float:
    tokens, steps = counts.sum(axis=1)
    return float(tokens / steps) if steps else 1.0


def _influence(counts: Floats, tau: float) -> Floats:
    """Return what each prompt adds to the logarithm of tau, relative to the mean prompt."""
    tokens, steps = counts
    return (tokens - tau * steps) / max(float(tokens.mean()), 1e-9)


def _decoder(target: TargetAdapter, drafter: JakiroDrafter) -> SpeculativeDecoder:
    used = TrainedDrafter.for_target(deepcopy(drafter), target, other_weights=True)
    return SpeculativeDecoder(target.model, used, tree="fixed")
