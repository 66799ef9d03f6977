"""Decodes the same prompts by several methods, in turns, and counts what each one took."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.progress import Progress
from transformers import PreTrainedModel

from inference.decoder import SpeculativeDecoder
from inference.stats import DecodeStats

TRANSFORMERS, LOOKUP, PLAIN, DRAFTER = (
    "transformers",
    "transformers-lookup",
    "plain",
    "jakiro",
)


@dataclass(frozen=True)
class Sample:
    """One generated continuation."""

    token_ids: list[int]
    depths: list[int]  # how each token was won; all 0 where nothing was drafted by us
    stats: DecodeStats


# A way to continue a prompt, given its ids, a temperature, and a seed.
Method = Callable[[list[int], float, int], Sample]


@dataclass
class Measured:
    """All continuations of one method at one temperature."""

    method: str
    temperature: float
    samples: list[Sample] = field(default_factory=list)

    @property
    def stats(self) -> DecodeStats:
        """Pooled over the prompts."""
        return DecodeStats.pooled(sample.stats for sample in self.samples)


def by_decoder(decoder: SpeculativeDecoder, max_new_tokens: int) -> Method:
    """Return our decode loop as a method."""

    def run(prompt: list[int], temperature: float, seed: int) -> Sample:
        output = decoder.generate(
            prompt, temperature=temperature, seed=seed, max_new_tokens=max_new_tokens
        )
        return Sample(output.new_token_ids, output.depths, output.stats)

    return run


def by_transformers(model: PreTrainedModel, max_new_tokens: int, **how: Any) -> Method:
    """Return the target's own `generate()` as a method.

    Args:
        model: the target.
        max_new_tokens: length of a continuation.
        **how: further arguments, such as prompt_lookup_num_tokens.
    """
    generate: Any = model.generate

    def run(prompt: list[int], temperature: float, seed: int) -> Sample:
        ids = torch.tensor([prompt], device=model.device)
        law = {"do_sample": True, "temperature": temperature} if temperature else {}
        torch.manual_seed(seed)
        with _forwards_of(model) as forwards:
            tokens = generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                pad_token_id=0,
                **({"do_sample": False} | law | how),
            )
        new = tokens[0, len(prompt) :].tolist()
        return Sample(new, [0] * len(new), forwards.stats(len(new)))

    return run


def compare(
    methods: dict[str, Method],
    prompts: Sequence[list[int]],
    temperatures: Sequence[float],
    progress: Progress,
) -> list[Measured]:
    """Return what each method did with every prompt at every temperature.

    Methods take turns on each prompt, so that a drift of the machine's speed meets all of them; a
    first round on the first prompt warms up and is thrown away.
    """
    measured = {
        (name, temperature): Measured(name, temperature)
        for temperature in temperatures
        for name in methods
    }
    task = progress.add_task("Comparing", total=len(measured) * (len(prompts) + 1))
    for place, prompt in enumerate([prompts[0], *prompts]):
        for (name, temperature), results in measured.items():
            sample = methods[name](prompt, temperature, place)
            if place > 0:
                results.samples.append(sample)
            progress.advance(task)
    return list(measured.values())


@dataclass
class _Forwards:
    """Counts a model's forwards and notes when the first one ended."""

    started: float = 0.0
    prefilled: float = 0.0
    ended: float = 0.0
    count: int = 0

    def stats(self, emitted: int) -> DecodeStats:
        """Return the counts in our own terms: the first forward is the prefill."""
        stats = DecodeStats(emitted=emitted, target_forwards=self.count - 1)
        stats.seconds["total"] = self.ended - self.started
        stats.seconds["prefill"] = self.prefilled - self.started
        return stats


@contextmanager
def _forwards_of(model: PreTrainedModel) -> Iterator[_Forwards]:
    forwards = _Forwards()

    def note(*_: object) -> None:
        forwards.count += 1
        if forwards.count == 1:
            forwards.prefilled = time.perf_counter()

    handle = model.register_forward_hook(note)
    forwards.started = time.perf_counter()
    try:
        yield forwards
    finally:
        forwards.ended = time.perf_counter()
        handle.remove()
