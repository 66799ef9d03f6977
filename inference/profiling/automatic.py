"""Measures `tree="auto"` against autoregressive decoding.

Run it as `python -m inference.profiling.automatic --drafter PATH`. The program measures the ratio
of seconds, pooled over all prompts and learning included, with the given drafter and with a useless
drafter (random weights) at each temperature. It prints progress to standard error and, as its last
line, a JSON document to standard output.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from inference.autotune.costs import known_costs
from inference.autotune.online import AutoTree
from inference.autotune.search import largest_trees
from inference.benchmark.machine import emit, environment
from inference.benchmark.stats import interval
from inference.benchmark.timing import note, seconds_of
from inference.drafters.trained.drafter import TrainedDrafter
from inference.engine.loop import DecodeRun
from inference.engine.policy import DraftPolicy
from inference.engine.stats import DecodeStats
from inference.generation.preparation import prepare_requests
from inference.profiling.subject import (
    add_prompt_options,
    add_target_options,
    load_drafter,
    load_prompts,
    load_target,
)
from jakiro.drafter import JakiroDrafter
from jakiro.target.adapter import TargetAdapter

# Largest acceptable slow-down by automatic trees, at the upper end of the interval.
MOST_SLOW_DOWN = 1.05


class Pair(NamedTuple):
    """Seconds of a prompt decoded both ways."""

    autoregressive: float  # seconds
    automatic: float  # seconds
    stats: DecodeStats  # with automatic trees


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the document."""
    options = _parse(arguments)
    target = TargetAdapter(load_target(options))
    prompts = load_prompts(options, target)
    drafters = {"useless": load_drafter(None, target)}
    if options.drafter is not None:
        drafters["given"] = load_drafter(options.drafter, target)
    summaries = []
    for name, drafter in drafters.items():
        for temperature in options.temperatures:
            pairs = _measure(target, drafter, prompts, options.new_tokens, temperature)
            summaries.append({"drafter": name, "temperature": temperature, **_summary(pairs)})
            note(str(summaries[-1]))
    emit({"automatic": summaries, "environment": environment(target, options)})
    return 0


def _measure(
    target: TargetAdapter,
    drafter: JakiroDrafter,
    prompts: Sequence[list[int]],
    new_tokens: int,
    temperature: float,
) -> list[Pair]:
    """Decode every prompt both ways, interleaved, after a warm-up on the first prompt."""
    plan = largest_trees(drafter)
    trained = TrainedDrafter(drafter, target, plan)
    costs = known_costs(target, drafter)

    def run(prompt: list[int], seed: int, policy: DraftPolicy | None) -> DecodeRun:
        requests, _ = prepare_requests(
            target.model,
            [prompt],
            seed=seed,
            max_position=target.spec.max_position,
            temperature=temperature,
            max_new_tokens=new_tokens,
        )
        return DecodeRun(target, trained if policy else None, requests, policy)

    for policy in (None, AutoTree(plan, costs)):
        run(prompts[0], 0, policy).finish()
    automatic = AutoTree(plan, costs)  # has learnt nothing yet
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
        "share_of_rounds_drafted": stats.reached[1] / max(stats.target_forwards, 1),
    }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure automatic trees.")
    add_target_options(parser)
    add_prompt_options(parser, count=20, new_tokens=48)
    parser.add_argument("--drafter", help="folder or Hub id; by default only a useless drafter")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
