"""Comparison of `tree="auto"` with autoregressive decoding, for `jakiro profile automatic`.

The result is the time for decoding all prompts with automatic trees, divided by the time without
drafts. The time with automatic trees includes the decoding steps in which the best sizes of the
trees are learned. At each temperature, this ratio is measured with the given drafter and with a
useless drafter, which has random weights. Progress is printed to standard error.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import PositiveInt

from inference.autotune.costs import known_costs
from inference.autotune.online import AutoTree
from inference.autotune.search import largest_trees
from inference.benchmark.machine import environment
from inference.benchmark.stats import interval
from inference.benchmark.timing import note, seconds_of
from inference.drafters.trained.drafter import TrainedDrafter
from inference.engine.loop import DecodeRun
from inference.engine.policy import DraftPolicy
from inference.engine.stats import DecodeStats
from inference.generation.preparation import prepare_requests
from inference.profiling.subject import (
    PromptSettings,
    load_drafter,
    load_prompts,
    load_target,
)
from jakiro.drafter import JakiroDrafter
from jakiro.target.adapter import TargetAdapter

# Largest acceptable slow-down by automatic trees; the upper end of the interval must not exceed it.
MOST_SLOW_DOWN = 1.05


class Pair(NamedTuple):
    """Seconds for decoding one prompt without drafts and with automatic trees."""

    autoregressive: float  # seconds without drafts
    automatic: float  # seconds with automatic trees
    stats: DecodeStats  # statistics with automatic trees


class AutomaticSettings(PromptSettings):
    """Target, drafter, prompts and temperatures of the measurement.

    Attributes:
        temperatures: sampling temperatures; 0 is greedy.
    """

    count: PositiveInt = 20
    prompt_tokens: PositiveInt = 128
    new_tokens: PositiveInt = 48
    temperatures: tuple[float, ...] = (0.0, 1.0)


def measure_automatic(settings: AutomaticSettings) -> dict[str, Any]:
    """Decode all prompts without drafts and with automatic trees; return the JSON output."""
    target = TargetAdapter(load_target(settings))
    prompts = load_prompts(settings, target)
    drafters = {"useless": load_drafter(None, target)}
    if settings.drafter is not None:
        drafters["given"] = load_drafter(settings.drafter, target)
    summaries = []
    for name, drafter in drafters.items():
        for temperature in settings.temperatures:
            pairs = _measure(target, drafter, prompts, settings.new_tokens, temperature)
            summaries.append({"drafter": name, "temperature": temperature, **_summary(pairs)})
            note(str(summaries[-1]))
    return {"automatic": summaries, "environment": environment(target, settings)}


def _measure(
    target: TargetAdapter,
    drafter: JakiroDrafter,
    prompts: Sequence[list[int]],
    new_tokens: int,
    temperature: float,
) -> list[Pair]:
    """Decode every prompt without drafts and with automatic trees, in alternating order.

    Before that, the first prompt is decoded once in each of the two ways, as a warm-up.
    """
    trained = TrainedDrafter(drafter, target, largest_trees(drafter))
    costs = known_costs(target, drafter)

    def run(prompt: list[int], seed: int, policy: DraftPolicy | None) -> DecodeRun:
        requests, _ = prepare_requests(
            target.model,
            [prompt],
            {"max_new_tokens": new_tokens},
            temperature=temperature,
            seed=seed,
            max_position=target.spec.max_position,
        )
        return DecodeRun(target, trained if policy else None, requests, policy)

    for policy in (None, AutoTree(trained.plan, costs)):
        run(prompts[0], 0, policy).finish()
    automatic = AutoTree(trained.plan, costs)  # a new policy, which has not learned anything yet
    pairs = []
    for seed, prompt in enumerate(prompts):
        runs = [run(prompt, seed, None), run(prompt, seed, automatic)]
        order = (0, 1) if seed % 2 else (1, 0)
        seconds = {index: seconds_of(runs[index].finish) for index in order}
        pairs.append(Pair(seconds[0], seconds[1], runs[1].stats))
    return pairs


def _summary(pairs: Sequence[Pair]) -> dict[str, Any]:
    def ratio(some: Sequence[Pair]) -> float:
        return sum(pair.automatic for pair in some) / sum(pair.autoregressive for pair in some)

    slow_down = interval(pairs, ratio)
    stats = DecodeStats.pooled(pair.stats for pair in pairs)
    return {
        "slow_down": slow_down._asdict(),
        "at_most": MOST_SLOW_DOWN,
        "tokens": stats.emitted,
        "tau": stats.tau,
        "share_of_steps_drafted": stats.reached[1] / max(stats.target_forwards, 1),
    }
