"""The comparison that a new version must pass: both drafters decode held-out prompts."""

from collections.abc import Sequence
from copy import deepcopy
from typing import NamedTuple

import numpy as np

from inference.adaptation.lesson import Passage, Recipe
from inference.benchmark.stats import Floats, Rate, ratio
from inference.decoder import SpeculativeDecoder
from inference.drafters.trained.drafter import TrainedDrafter
from jakiro.drafter import JakiroDrafter
from jakiro.target.adapter import TargetAdapter

FEWEST = 4  # with fewer prompts, no version is ever better


class GateResult(NamedTuple):
    """The tau of three drafters on the same prompts.

    Attributes:
        low: lower end of the 95% interval of after / before.
        older: on the older half of the prompts, the smaller one of after / before and after / own.
        harm: lower end of the 95% interval of own / before.
    """

    own: float
    before: float
    after: float
    low: float
    older: float
    harm: float

    def is_better(self, largest_loss: float) -> bool:
        """Return whether the new drafter is better beyond noise, without a loss on older prompts.

        It must not be worse than the drafter itself either, so that small losses do not add up.

        Args:
            largest_loss: share of tau that the older half of the prompts may lose.
        """
        return self.low > 1 and self.after >= self.own and self.older >= 1 - largest_loss

    @property
    def is_harmful(self) -> bool:
        """Whether what the drafter in use has learned does harm, beyond noise."""
        return self.harm > 1


class Drafters(NamedTuple):
    """Drafters that are compared.

    Attributes:
        current: drafter in use; the same object as `own` if nothing was learned yet.
    """

    own: JakiroDrafter
    current: JakiroDrafter
    candidate: JakiroDrafter


def compare_drafters(
    target: TargetAdapter, drafters: Drafters, held_out: Sequence[Passage], recipe: Recipe
) -> GateResult:
    """Compare drafters by greedy decoding, alternately, of prompts that none of them has learned.

    All give the same texts, so only the numbers of decoding steps differ.

    Args:
        held_out: prompts with continuations, the oldest first.
    """
    decoders = {id(drafter): _decoder(target, drafter) for drafter in drafters}
    counts = {key: np.zeros((2, len(held_out))) for key in decoders}  # tokens or steps, prompt
    for number, passage in enumerate(held_out):
        prompt = list(passage.token_ids[: passage.prompt_length])[-recipe.max_length :]
        room = target.spec.max_position - len(prompt)
        for key, decoder in decoders.items():
            new = min(recipe.compared_tokens, room)
            stats = decoder.generate(prompt, max_new_tokens=new, temperature=0).stats
            counts[key][:, number] = stats.decoded, stats.target_forwards
    return compare_counts(*(counts[id(drafter)] for drafter in drafters))


def compare_counts(own: Floats, before: Floats, after: Floats) -> GateResult:
    """Return the result for numbers of tokens and decoding steps.

    Args:
        own: tokens and steps of each prompt with the drafter itself [2, prompts].
    """
    taus = {"own": _tau(own), "before": _tau(before), "after": _tau(after)}
    if own.shape[1] < FEWEST or not own.sum():
        return GateResult(**taus, low=0.0, older=0.0, harm=0.0)
    half = own.shape[1] // 2
    older = [_tau(counts[:, :half]) for counts in (own, before, after)]
    return GateResult(
        **taus,
        low=_low(before, after),
        older=older[2] / max(older[0], older[1]),
        harm=_low(before, own),
    )


def _low(before: Floats, after: Floats) -> float:
    """Return the lower end of the 95% interval of the ratio of two taus, over prompts."""
    new, old = (Rate(counts[:1], counts[1:]) for counts in (after, before))
    return ratio(new, old).low


def _tau(counts: Floats) -> float:
    tokens, steps = counts.sum(axis=1)
    return float(tokens / steps) if steps else 1.0


def _decoder(target: TargetAdapter, drafter: JakiroDrafter) -> SpeculativeDecoder:
    used = TrainedDrafter.for_target(deepcopy(drafter), target, forms=(), other_weights=True)
    return SpeculativeDecoder(target.model, used, tree="fixed")
