"""Made-up studies with known effects."""

from collections.abc import Mapping

import numpy as np
from helpers.comparisons import make_document

from inference.benchmark.document import ComparisonDocument, MethodFigures, Sample
from inference.benchmark.stats import Rate
from jakiro.utils.settings import validate_settings
from training.ablation.arms import Arm
from training.config import TrainSettings


def made_up_rate(
    random: np.random.Generator,
    prompts: np.ndarray,
    effect: float = 0.0,
    seed_noise: float = 0.01,
    prompt_noise: float = 0.05,
    cell_noise: float = 0.02,
    seeds: int = 3,
) -> Rate:
    """Return the rates 2 exp(effect + prompts), with noise on their logarithms."""
    count = len(prompts)
    logs = (
        effect
        + prompts
        + random.normal(0, seed_noise, (seeds, 1))
        + random.normal(0, prompt_noise, (1, count))
        + random.normal(0, cell_noise, (seeds, count))
    )
    forwards = np.full((seeds, count), 25.0)
    return Rate(2 * forwards * np.exp(logs), forwards)


def made_up_documents(
    effects: Mapping[str, float],
    temperatures: tuple[float, ...] = (0.0,),
    seeds: int = 3,
    prompts: int = 20,
    repeats: int = 1,
    number: int = 0,
) -> dict[int, ComparisonDocument]:
    """Return the documents of a study, by seed; the tau of an arm is 2 exp(effect), with noise.

    Args:
        number: seed of the random numbers.
    """
    random = np.random.default_rng(number)
    easiness = random.normal(0, 0.4, prompts)
    arms = {
        (name, temperature): made_up_rate(random, easiness, effect, seeds=seeds)
        for temperature in temperatures
        for name, effect in effects.items()
    }
    template = make_document(["autoregressive", *effects], temperatures)
    return {
        seed: template.model_copy(
            update={
                "methods": tuple(
                    _with_samples(each, arms.get((each.name, each.temperature)), seed, repeats)
                    if each.name != "autoregressive"
                    else _with_samples(each, _autoregressive(seeds, prompts), seed, repeats)
                    for each in template.methods
                )
            }
        )
        for seed in range(seeds)
    }


def made_up_arm(name: str, **changes: object) -> Arm:
    """Return an arm that was trained with three seeds."""
    needed = {"target": {"name_or_path": "target"}, "data": {"paths": ["texts.jsonl"]}}
    settings = validate_settings(TrainSettings, {**needed, **changes}, source="the test")
    return Arm(name, settings, 1_234_567)


_TWO = {"experts": {"num_experts": 2, "intermediate_size": 512}}
_ONE = {"experts": {"num_experts": 1, "intermediate_size": 1030}}
_ON, _OFF = {"contrast_weight": 0.1}, {"contrast_weight": 0.0}

# The arms of a 2 x 2 comparison of experts and contrastive loss.
FOUR_CELLS = (
    made_up_arm("base", drafter=_TWO, objective=_ON),
    made_up_arm("contrast-off", drafter=_TWO, objective=_OFF),
    made_up_arm("experts-off", drafter=_ONE, objective=_ON),
    made_up_arm("both-off", drafter=_ONE, objective=_OFF),
)


def _autoregressive(seeds: int, prompts: int) -> Rate:
    return Rate(np.full((seeds, prompts), 50.0), np.full((seeds, prompts), 50.0))


def _with_samples(figures: MethodFigures, rate: Rate | None, seed: int, repeats: int) -> object:
    """Return figures whose samples have the given rate; every target forward takes 10 ms."""
    assert rate is not None
    samples = [
        Sample(
            prompt=f"{prompt:08x}",
            category="all",
            repeat=repeat,
            group=prompt,
            tokens=round(1000 * tokens) + 2,
            decoded=round(1000 * tokens),
            target_forwards=round(1000 * forwards),
            turns=2,
            seconds=10 * forwards,
            draft=2 * forwards,
            seconds_to_first_token=0.04,
        )
        for prompt, (tokens, forwards) in enumerate(
            zip(rate.top[seed], rate.bottom[seed], strict=True)
        )
        for repeat in range(repeats)
    ]
    return figures.model_copy(update={"samples": tuple(samples)})
