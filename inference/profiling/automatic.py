"""`tree="auto"` against plain decoding: `python -m inference.profiling.automatic --drafter PATH`.

With the given drafter and with a useless one (random weights), at each temperature: how much
faster or slower than plain decoding, pooled over all prompts, what it had to learn included. Prints
progress to standard error and, as its last line, one JSON document to standard output.
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

MOST_SLOW_DOWN = 1.05  # that automatic trees may cost, at the upper end of the interval


class Pair(NamedTuple):
    """One prompt decoded both ways."""

    plain: float  # seconds
    automatic: float
    stats: DecodeStats  # of the latter


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the document."""
    options = _parse(arguments)
    target = TargetAdapter(load_target(options))
    prompts = load_prompts(options, target)
    drafters = {"useless": load_drafter(None, target)}
    if options.drafter is not None:
        drafters["given"] = load_drafter(options.drafter, target)
    rows = []
    for name, drafter in drafters.items():
        for temperature in options.temperatures:
            pairs = _measure(target, drafter, prompts, options.new_tokens, temperature)
            rows.append({"drafter": name, "temperature": temperature, **_summary(pairs)})
            note(str(rows[-1]))
    emit({"automatic": rows, "environment": environment(target, options)})
    return 0


def _measure(
    target: TargetAdapter,
    drafter: JakiroDrafter,
    prompts: Sequence[list[int]],
    new_tokens: int,
    temperature: float,
) -> list[Pair]:
    """Decode every prompt both ways in turns, after the first one has warmed both up."""
    plan = largest_trees(drafter)
    trained = TrainedDrafter(drafter, target, plan)
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

    for policy in (None, AutoTree(plan, costs)):
        run(prompts[0], 0, policy).finish()
    automatic = AutoTree(plan, costs)  # knows nothing yet
    pairs = []
    for seed, prompt in enumerate(prompts):
        runs = [run(prompt, seed, None), run(prompt, seed, automatic)]
        order = (0, 1) if seed % 2 else (1, 0)
        seconds = {place: seconds_of(runs[place].finish) for place in order}
        pairs.append(Pair(seconds[0], seconds[1], runs[1].stats))
    return pairs


def _summary(pairs: Sequence[Pair]) -> dict[str, Any]:
    slow_down = interval(
        pairs, lambda some: sum(one.automatic for one in some) / sum(one.plain for one in some)
    )
    stats = DecodeStats.pooled(one.stats for one in pairs)
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
    parser.add_argument("--drafter", help="folder or hub id; by default only a useless one")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
