"""Synthetic comparison documents with plausible figures."""

import random
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from inference.benchmark.document import (
    CategoryFigures,
    ComparisonDocument,
    ExpertFigures,
    MethodFigures,
    Quantiles,
    Seconds,
)
from inference.benchmark.machine import Environment, TargetFacts
from inference.benchmark.samples import Sample
from inference.benchmark.settings import ComparisonSettings
from inference.trees.shape import TreeShape


def make_document(
    methods: Sequence[str] = ("autoregressive", "drafter=mine"),
    temperatures: Sequence[float] = (0.0,),
    categories: Sequence[str] = (),
    experts: Sequence[int] = (2,),
    depth: int = 3,
    prompts: int = 4,
    seed: int = 0,
) -> ComparisonDocument:
    """Return a document that contains everything a report can show."""
    randomness = random.Random(seed)
    drafting = [name for name in methods if _drafts(name)]
    num_experts = {name: experts[at % len(experts)] for at, name in enumerate(drafting)}
    shared = {"depth": depth, "categories": categories, "prompts": prompts}
    figures = [
        make_figures(
            *(name, temperature, randomness),
            is_baseline=name == methods[0],
            experts=num_experts.get(name, 0),
            **shared,
        )
        for temperature in temperatures
        for name in methods
    ]
    return ComparisonDocument(
        environment=make_environment(),
        settings=ComparisonSettings(
            methods=tuple(methods), prompts="prompts.jsonl", temperatures=tuple(temperatures)
        ),
        prompts=prompts,
        baseline=methods[0],
        methods=tuple(figures),
    )


def with_figures(document: ComparisonDocument, index: int, **changes: object) -> ComparisonDocument:
    """Return the document with changes to the figures of the method at `index`."""
    methods = list(document.methods)
    methods[index] = methods[index].model_copy(update=changes)
    return document.model_copy(update={"methods": tuple(methods)})


def dequantized(document: ComparisonDocument, gguf_sha256: str) -> ComparisonDocument:
    """Return the document with a target that was converted from a GGUF file of this checksum."""
    environment = document.environment
    target = environment.target.model_copy(update={"gguf_sha256": gguf_sha256})
    environment = environment.model_copy(update={"target": target})
    return document.model_copy(update={"environment": environment})


def make_environment() -> Environment:
    """Return a synthetic environment."""
    return Environment(
        time="2026-11-21T12:00:00+00:00",
        argv=("jakiro", "bench", "autoregressive", "drafter=mine", "--prompts", "prompts.jsonl"),
        commit="0123456789abcdef0123456789abcdef01234567",
        is_dirty=True,
        versions={"jakiro": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0", "cuda": None},
        platform="Linux-6.1-x86_64",
        processor="A processor with eight cores",
        device="cpu",
        num_cpus=8,
        threads=8,
        spin_count="3000",
        load_average=0.4,
        target=TargetFacts(
            name_or_path="organisation/target-7b",
            fingerprint="f" * 16,
            parameters=7_241_732_096,
            dtype="bfloat16",
            bytes_per_cached_token=131_072,
        ),
    )


def make_figures(
    name: str,
    temperature: float,
    randomness: random.Random,
    *,
    is_baseline: bool = False,
    experts: int = 2,
    depth: int = 3,
    categories: Sequence[str] = (),
    prompts: int = 4,
) -> MethodFigures:
    """Return synthetic figures of a method at a temperature."""
    drafts = _drafts(name)
    speeds = _speeds(drafts, is_baseline, randomness)
    tau, rate, tokens = speeds["tau"], speeds["tokens_per_second"], 96 * prompts
    by_depth = _acceptance(depth, randomness) if drafts else ()
    return MethodFigures(
        name=name,
        kind="drafter" if drafts else name,
        temperature=temperature,
        **speeds,
        tau_low=0.93 * tau if drafts else 1.0,
        tau_high=1.06 * tau if drafts else 1.0,
        tokens=tokens,
        target_forwards=round(tokens / tau),
        decoding_tokens_per_second=1.1 * rate,
        identical_to_target=None if temperature else True,
        identical_share=None if temperature else 1.0,
        conditional_acceptance_rate=by_depth,
        acceptance_rate_per_position=tuple(accumulate(by_depth, mul)),
        experts=_expert_figures(experts, randomness) if drafts else (),
        seconds=_seconds(tokens / rate, drafts),
        time_to_first_token=Quantiles(p50=0.0412, p95=0.0733),
        inter_token=Quantiles(p50=0.8 / rate, p95=1.9 / rate),
        peak_memory_bytes=int(15.2 * 2**30),
        tree=TreeShape() if drafts else None,
        parameters=231_014_400 if drafts else None,
        notes=("trained on other text than these prompts",) if drafts else (),
        categories={
            category: _category(speeds, drafts, prompts, randomness) for category in categories
        },
        samples=_samples(prompts, rate, tau, categories or ("all",), randomness),
    )


def _drafts(name: str) -> bool:
    return name not in ("autoregressive", "transformers")


def _speeds(drafts: bool, is_baseline: bool, randomness: random.Random) -> dict[str, float]:
    speedup = 1.0 if is_baseline else randomness.uniform(0.97, 1.05)
    speedup *= randomness.uniform(1.2, 3.2) if drafts else 1.0
    spread = 0.0 if is_baseline else 0.08 * speedup
    return {
        "tau": 1 + 1.2 * speedup if drafts else 1.0,
        "tokens_per_second": 24.0 * speedup,
        "speedup": speedup,
        "speedup_low": speedup - spread,
        "speedup_high": speedup + spread,
    }


def _category(
    speeds: dict[str, float], drafts: bool, prompts: int, randomness: random.Random
) -> CategoryFigures:
    factor = randomness.uniform(0.85, 1.15) if drafts else 1.0
    return CategoryFigures(
        prompts=prompts, **{key: factor * value for key, value in speeds.items()}
    )


def _samples(
    prompts: int, rate: float, tau: float, categories: Sequence[str], randomness: random.Random
) -> tuple[Sample, ...]:
    return tuple(
        Sample(
            prompt=f"{prompt:08x}",
            category=categories[prompt % len(categories)],
            repeat=0,
            group=prompt,
            tokens=96,
            decoded=95,
            target_forwards=round(96 / tau),
            seconds=96 / rate * randomness.uniform(0.8, 1.25),
            seconds_to_first_token=0.04,
        )
        for prompt in range(prompts)
    )


def _acceptance(depth: int, randomness: random.Random) -> tuple[float, ...]:
    first = randomness.uniform(0.55, 0.85)
    return tuple(first * randomness.uniform(0.85, 1.1) for _ in range(depth))


def _expert_figures(count: int, randomness: random.Random) -> tuple[ExpertFigures, ...]:
    proposed = [randomness.randrange(200, 900) for _ in range(count)]
    return tuple(
        ExpertFigures(expert=expert, proposed=many, accepted=int(many * randomness.uniform(0.2, 1)))
        for expert, many in enumerate(proposed)
    )


def _seconds(total: float, drafts: bool) -> Seconds:
    shares = (0.08, 0.22, 0.58, 0.05, 0.07) if drafts else (0.06, 0.0, 0.88, 0.0, 0.06)
    prefill, draft, verify, commit, other = (total * share for share in shares)
    return Seconds(prefill=prefill, draft=draft, verify=verify, commit=commit, other=other)
