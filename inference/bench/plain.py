"""Decoding without drafts against the target's own `generate()`."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from inference.bench.intervals import Figure, median_interval
from inference.bench.subject import Subject
from inference.bench.timing import note, seconds_of
from inference.decoder import SpeculativeDecoder

GOAL, COMPILED_GOAL = 1.05, 1.3
WARM_UPS = 2  # full generations before any is timed; the first one compiles

Method = Callable[[list[int]], object]


def measure_plain(subject: Subject) -> dict[str, Figure]:
    """Return how many times as long `generate()` takes as plain decoding, eager and compiled."""
    methods = _methods(subject)
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for method in methods.values():
        for _ in range(WARM_UPS):
            method(subject.prompts[0])
    names = list(methods)
    for number, prompt in enumerate(subject.prompts):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            seconds[name].append(seconds_of(partial(methods[name], prompt)))
        last = ", ".join(f"{name} {taken[-1]:.2f} s" for name, taken in seconds.items())
        note(f"plain decoding, prompt {number + 1}: {last}")
    return {
        "plain_vs_transformers": _figure(seconds, "plain", GOAL),
        "plain_compiled_vs_transformers": _figure(seconds, "compiled", COMPILED_GOAL),
    }


def by_transformers(model: PreTrainedModel, prompt: list[int], new_tokens: int) -> list[int]:
    """Return the prompt and its greedy continuation by `generate()`."""
    ids = torch.tensor([prompt], device=model.device)
    generate: Any = model.generate
    tokens = generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return [int(token) for token in tokens[0]]


def can_compile() -> bool:
    """Whether this version of the decoder compiles its target."""
    return "compiled" in inspect.signature(SpeculativeDecoder).parameters


def _methods(subject: Subject) -> dict[str, Method]:
    count = subject.effort.new_tokens
    methods: dict[str, Method] = {
        "transformers": lambda ids: by_transformers(subject.model, ids, count),
        "plain": _by_decoder(SpeculativeDecoder(subject.model), count),
    }
    if can_compile() and not subject.is_quick:
        kwargs: dict[str, Any] = {"compiled": True}
        methods["compiled"] = _by_decoder(SpeculativeDecoder(subject.model, **kwargs), count)
    return methods


def _by_decoder(decoder: SpeculativeDecoder, new_tokens: int) -> Method:
    return lambda ids: decoder.generate(ids, temperature=0.0, max_new_tokens=new_tokens)


def _figure(seconds: dict[str, list[float]], name: str, goal: float) -> Figure:
    if name not in seconds:
        reason = "left out of a quick run" if can_compile() else "the decoder cannot compile"
        return Figure(None, goal, {"note": reason})
    pairs = zip(seconds["transformers"], seconds[name], strict=True)
    return Figure(median_interval([theirs / ours for theirs, ours in pairs]), goal)
