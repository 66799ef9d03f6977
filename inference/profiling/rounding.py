"""Frequency of greedy tokens that change because of rounding, for `jakiro profile rounding`.

The logits of a token differ in the last digits between reading tokens one by one and reading them
as trees. If two tokens have nearly the same logit, the most likely token may therefore change.
Progress is printed to standard error.
"""

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, Literal, NamedTuple

import torch
from pydantic import PositiveInt
from transformers import LogitsProcessorList

from inference.benchmark.machine import environment
from inference.benchmark.stats import interval
from inference.benchmark.timing import note
from inference.drafters.trained.drafter import TrainedDrafter
from inference.engine.context import Context
from inference.profiling.oracle import OracleDrafter
from inference.profiling.runs import by_transformers
from inference.profiling.subject import (
    PromptSettings,
    load_drafter,
    load_prompts,
    load_target,
    start,
)
from inference.protocol import Drafter
from inference.sampling.options import Sampling
from inference.trees.shape import TreeShape
from jakiro.target.adapter import TargetAdapter
from jakiro.target.step import StepInput

RIGHT, NODES = 3, 8  # numbers of accepted drafts and of nodes in each of the oracle's trees


class Outcome(NamedTuple):
    """Differences from the output of transformers' `generate()` for one prompt."""

    # for each way of reading: whether the most likely token differs at each position
    differs: dict[str, list[bool]]
    # for each way of decoding: index of the first token that differs; None if no token differs
    first: dict[str, int | None]


class RoundingSettings(PromptSettings):
    """Target, drafter and prompts of the measurement."""

    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    count: PositiveInt = 20
    prompt_tokens: PositiveInt = 128
    new_tokens: PositiveInt = 64


def measure_rounding(settings: RoundingSettings) -> dict[str, Any]:
    """Compare the output for each prompt with that of `generate()`; return the JSON output."""
    target = TargetAdapter(load_target(settings))
    prompts = load_prompts(settings, target)
    shape = TreeShape(parallel_levels=0)
    trained = TrainedDrafter(load_drafter(settings.drafter, target), target, shape)
    outcomes = []
    for number, prompt in enumerate(prompts, start=1):
        outcomes.append(_outcome(target, trained, prompt, settings.new_tokens))
        note(f"prompt {number} of {len(prompts)}: first difference at {outcomes[-1].first}")
    return {
        "argmax_differs": _shares(outcomes, lambda outcome: outcome.differs),
        "continuations_differ": _shares(
            outcomes,
            lambda outcome: {way: [i is not None] for way, i in outcome.first.items()},
        ),
        "first_difference": [outcome.first for outcome in outcomes],
        "positions": len(outcomes) * settings.new_tokens,
        "environment": environment(target, settings),
    }


def _outcome(
    target: TargetAdapter, trained: Drafter, prompt: list[int], new_tokens: int
) -> Outcome:
    steps = -(-new_tokens // (RIGHT + 1))
    known = by_transformers(target.model, prompt, steps * (RIGHT + 1) + RIGHT + 2)
    oracle = OracleDrafter([known], target.spec.vocab_size, target.device, RIGHT, NODES)
    ways: dict[str, Drafter | None] = {"autoregressive": None, "drafted": trained, "oracle": oracle}
    with torch.inference_mode():
        differs = {
            "one by one": _read_singly(target, known, len(prompt), new_tokens),
            "as trees": _read_as_trees(target, oracle, known, len(prompt), new_tokens),
        }
    return Outcome(
        differs,
        {name: _first(target, used, prompt, known, new_tokens) for name, used in ways.items()},
    )


def _read_singly(
    target: TargetAdapter, known: list[int], prompt: int, new_tokens: int
) -> list[bool]:
    context = _after_prompt(target, known, prompt)
    differs = []
    for length in range(prompt, prompt + new_tokens):
        (features,) = context.read([known], 0, 1)
        context.lengths = [length + 1]
        best = int(target.logits(features)[-1].argmax())
        differs.append(best != known[length + 1])
    return differs


def _read_as_trees(
    target: TargetAdapter, oracle: OracleDrafter, known: list[int], prompt: int, new_tokens: int
) -> list[bool]:
    context = _after_prompt(target, known, prompt)
    right = [0, *range(2, 2 * RIGHT + 1, 2)]  # query indices of the root and the right candidates
    differs: list[bool] = []
    for length in range(prompt, prompt + new_tokens, RIGHT + 1):
        output = target.forward(_tree_step(oracle, known, length), context.cache)
        best = target.logits(output.features)[0].argmax(dim=-1).tolist()
        expected = known[length + 1 : length + RIGHT + 2]
        differs += [best[query] != token for query, token in zip(right, expected, strict=True)]
        slots = torch.tensor([[length + query for query in right]], device=target.device)
        context.cache.move(slots, slots[:, :1] + torch.arange(RIGHT + 1, device=target.device))
        context.lengths = [length + RIGHT + 1]
    return differs[:new_tokens]


def _after_prompt(target: TargetAdapter, known: list[int], prompt: int) -> Context:
    greedy = Sampling(LogitsProcessorList(), do_sample=False)
    context = Context(target, None, greedy, 1, len(known) + NODES)
    context.read([known[:prompt]], 0, prompt)
    context.lengths = [prompt]
    return context


def _tree_step(oracle: OracleDrafter, known: list[int], length: int) -> StepInput:
    """Return the target's input for the root at position `length` and its tree."""
    tree = oracle.tree([length], [0])
    root = tree.token_ids.new_tensor([[known[length]]])
    nothing = torch.zeros_like(root)
    slots = length + torch.arange(NODES + 1, device=root.device)[None]
    return StepInput(
        token_ids=torch.cat((root, tree.token_ids), dim=1),
        positions=length + torch.cat((nothing, tree.depth), dim=1),
        slots=slots,
        lengths=tree.base_length,
        highest_slot=length + NODES,
        parents=torch.cat((nothing - 1, tree.parent + 1), dim=1),
        max_depth=tree.max_depth + 1,
    )


def _first(
    target: TargetAdapter,
    drafter: Drafter | None,
    prompt: list[int],
    known: list[int],
    new_tokens: int,
) -> int | None:
    """Return the index of the first new token that differs from `generate()`; None if none does."""
    got = start(target, drafter, [prompt], new_tokens).finish().token_ids[len(prompt) :]
    pairs = zip(got, known[len(prompt) :], strict=False)
    return next((index for index, (own, other) in enumerate(pairs) if own != other), None)


def _shares(
    outcomes: Sequence[Outcome], facts: Callable[[Outcome], dict[str, list[bool]]]
) -> dict[str, dict[str, float]]:
    """Return the share of differences in each way of reading or decoding, with its interval."""
    return {
        name: interval(
            [facts(outcome)[name] for outcome in outcomes],
            lambda prompts: fmean(differs for prompt in prompts for differs in prompt),
        )._asdict()
        for name in facts(outcomes[0])
    }
