"""Execution of a comparison, from its settings to the document with the figures of every method.

Intervals are computed over groups of prompts that are decoded together. At batch size 1, each group
is a single prompt.
"""

from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from statistics import median

from inference.benchmark.document import (
    ComparisonDocument,
    MethodFigures,
    Sample,
    environment_of,
)
from inference.benchmark.harness import Harness, Results, Texts
from inference.benchmark.methods import Method
from inference.benchmark.replay import replayed
from inference.benchmark.settings import (
    AUTOREGRESSIVE,
    TRANSFORMERS,
    WITHOUT_DRAFTERS,
    ComparisonSettings,
    methods_of,
)
from inference.benchmark.stats import SPEED, rate_of, ratio
from inference.benchmark.subject import Subject, build_methods
from inference.benchmark.transformers_methods import TransformersDecoding
from inference.engine.stats import DecodeStats
from inference.generation.prompt_file import BenchPrompt, distinct, read_prompts
from jakiro.errors import DataError
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.logs import get_logger
from jakiro.utils.progress import Track, untracked

_logger = get_logger(__name__)


def prompts_for(settings: ComparisonSettings) -> list[BenchPrompt]:
    """Return the prompts to decode, without duplicates, after checking the settings.

    The models need not be loaded for this.
    """
    methods_of(settings)
    read = read_prompts(Path(settings.prompts))
    prompts = distinct(read)
    if repeated := len(read) - len(prompts):
        _logger.warning(f"{repeated} duplicate prompts are ignored")
    if settings.replay and len(prompts[: settings.num_prompts]) < 2:
        raise DataError("an interval needs more than one prompt; pass more in --prompts")
    return _from_all_categories(prompts)[: settings.num_prompts]


def compare(
    settings: ComparisonSettings,
    prompts: Sequence[BenchPrompt],
    subject: Subject,
    name_or_path: str,
    track: Track = untracked,
) -> ComparisonDocument:
    """Measure all methods, and return the document.

    Args:
        name_or_path: name of the target in the document.
    """
    methods = build_methods(methods_of(settings), subject)
    if settings.replay:
        methods = replayed(methods, subject.decoder())
    return Comparison(settings, prompts, methods, subject, name_or_path).run(track)


class Comparison:
    """A comparison of several methods that decode the same prompts."""

    def __init__(
        self,
        settings: ComparisonSettings,
        prompts: Sequence[BenchPrompt],
        methods: Sequence[Method],
        subject: Subject,
        name_or_path: str,
    ) -> None:
        self.settings = settings
        self.prompts = prompts
        self.methods = methods
        self.model = subject.model
        self.baseline = settings.baseline or _default_baseline(methods)
        target = TargetAdapter(self.model)
        self.texts = Texts.of(target, subject.tokenizer)
        self.texts.require_room(prompts, settings.max_new_tokens)
        self.environment = environment_of(target, name_or_path)

    def run(self, track: Track = untracked) -> ComparisonDocument:
        """Measure all methods, and return the document."""
        harness = Harness(self.methods, self.settings, self.texts)
        # Untimed work that may fail is done first, so that a failure loses no measurement.
        reference = self._reference(harness, track)
        harness.advance = track("Decoding", harness.num_groups(self.prompts))
        results = harness.measure(self.prompts)
        return ComparisonDocument(
            environment=self.environment,
            settings=self.settings,
            prompts=len({sample.prompt for samples in results.values() for sample in samples}),
            is_complete=not harness.is_interrupted,
            baseline=self.baseline,
            methods=tuple(self._figures(results, reference)),
        )

    def _figures(self, results: Results, untimed: Sequence[Sample]) -> list[MethodFigures]:
        figures = []
        measured_at = {temperature for _, temperature in results}
        for temperature in filter(measured_at.__contains__, self.settings.temperatures):
            reference = None
            if not temperature and not self.settings.replay:
                greedy = untimed or results[str(self._measured_reference), 0.0]
                reference = {sample.prompt: sample.token_ids for sample in greedy}
            of_baseline = [
                results[method.name, temperature]
                for method in self.methods
                if method.family == self.baseline
            ]
            baseline = max(of_baseline, key=_speed)
            figures += [
                _figures_of(
                    method, temperature, results[method.name, temperature], baseline, reference
                )
                for method in self.methods
            ]
        return figures

    @property
    def _measured_reference(self) -> str | None:
        """The name of the method whose greedy tokens are the reference; None if no method can be.

        Tokens from batched decoding cannot serve as the reference, because padding changes the
        rounding in half precision.
        """
        names = (method.name for method in self.methods if method.kind == TRANSFORMERS)
        return None if self.settings.batch_size > 1 else next(names, None)

    def _reference(self, harness: Harness, track: Track) -> list[Sample]:
        """Return samples of the target's greedy tokens; none if they are not needed or measured."""
        is_needed = 0.0 in self.settings.temperatures and not self.settings.replay
        if not is_needed or self._measured_reference is not None:
            return []
        method = TransformersDecoding("reference", TRANSFORMERS, self.model)
        advance = track("Greedy answers of the target, not timed", len(self.prompts))
        samples = []
        for prompt in self.prompts:
            samples += harness.decode(method, [prompt], harness.sampling(0.0), 0)
            advance()
        return samples


def _from_all_categories(prompts: Sequence[BenchPrompt]) -> list[BenchPrompt]:
    """Return prompts interleaved by category, so that the first ones come from all categories."""
    by_category: dict[str, list[BenchPrompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    interleaved = chain.from_iterable(zip_longest(*by_category.values()))
    return [prompt for prompt in interleaved if prompt is not None]


def _default_baseline(methods: Sequence[Method]) -> str:
    by_kind = {method.kind: method.family for method in reversed(methods)}
    families = (by_kind[kind] for kind in (TRANSFORMERS, AUTOREGRESSIVE) if kind in by_kind)
    return next(families, methods[0].family)


def _speed(samples: Sequence[Sample]) -> float:
    """Return the new tokens divided by all seconds."""
    return sum(one.tokens for one in samples) / sum(one.seconds for one in samples)


def _figures_of(
    method: Method,
    temperature: float,
    samples: Sequence[Sample],
    baseline: Sequence[Sample],
    reference: Mapping[str, list[list[int]]] | None,
) -> MethodFigures:
    """Return the figures of a method at a temperature.

    Args:
        reference: greedy tokens of the target itself, for the hash of each prompt and each chat
            turn; None if tokens are sampled.
    """
    stats = DecodeStats.pooled(answer.stats for sample in samples for answer in sample.answers)
    same = []
    if reference is not None:
        same = [sample.token_ids == reference[sample.prompt] for sample in samples]
    groups = sorted({sample.group for sample in samples})
    speed, other = (rate_of([of], SPEED, groups, "group") for of in (samples, baseline))
    speedup = ratio(speed, other)
    return MethodFigures(
        name=method.name,
        family=method.family,
        kind=method.kind,
        temperature=temperature,
        tau=stats.tau,
        tokens_per_second=speed.pooled,
        speedup=speedup.value,
        speedup_low=speedup.low,
        speedup_high=speedup.high,
        tokens=stats.emitted,
        target_forwards=stats.target_forwards,
        drafting_share=None if method.kind in WITHOUT_DRAFTERS else stats.drafting_share,
        identical_share=sum(same) / len(same) if same else None,
        conditional_acceptance_rate=tuple(stats.conditional_acceptance_rate),
        seconds_to_first_token=median(one.seconds_to_first_token for one in samples),
        samples=tuple(samples),
    )
