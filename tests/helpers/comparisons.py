"""Synthetic comparison documents with plausible figures."""

from collections.abc import Sequence

from inference.benchmark.document import (
    ComparisonDocument,
    Environment,
    MethodFigures,
    Sample,
    TargetFacts,
)
from inference.benchmark.settings import ComparisonSettings


def make_document(
    methods: Sequence[str] = ("autoregressive", "drafter=mine"),
    temperatures: Sequence[float] = (0.0,),
    categories: Sequence[str] = ("all",),
    prompts: int = 4,
) -> ComparisonDocument:
    """Return a document that contains everything a report can show; later methods are faster."""
    figures = [
        _figures(name, temperature, 1 + 0.3 * number, categories, prompts)
        for temperature in temperatures
        for number, name in enumerate(methods)
    ]
    return ComparisonDocument(
        environment=_environment(),
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


def _environment() -> Environment:
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
        load_average=0.4,
        target=TargetFacts(
            name_or_path="organisation/target-7b",
            fingerprint="f" * 16,
            parameters=7_241_732_096,
            dtype="bfloat16",
        ),
    )


def _figures(
    name: str, temperature: float, speedup: float, categories: Sequence[str], prompts: int
) -> MethodFigures:
    drafts = name not in ("autoregressive", "transformers")
    tau, tokens = speedup if drafts else 1.0, 96 * prompts
    main = {
        "tau": tau,
        "tokens_per_second": 24 * speedup,
        "speedup": speedup,
        "speedup_low": 0.92 * speedup,
        "speedup_high": 1.08 * speedup,
    }
    return MethodFigures(
        name=name,
        kind="drafter" if drafts else name,
        temperature=temperature,
        **main,
        tokens=tokens,
        target_forwards=round(tokens / tau),
        identical_share=None if temperature else 1.0,
        conditional_acceptance_rate=(0.7, 0.6, 0.5) if drafts else (),
        seconds_to_first_token=0.0412,
        samples=tuple(
            Sample(
                prompt=f"{number:08x}",
                category=categories[number % len(categories)],
                repeat=0,
                group=number,
                tokens=96,
                decoded=95,
                target_forwards=round(96 / tau),
                seconds=4 / speedup,
                seconds_to_first_token=0.04,
            )
            for number in range(prompts)
        ),
    )
