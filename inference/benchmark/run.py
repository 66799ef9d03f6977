"""Execution of a comparison, from its settings to the resulting document."""

from collections.abc import Sequence
from itertools import chain, zip_longest
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from inference.benchmark.document import ComparisonDocument, MethodFigures
from inference.benchmark.figures import figures_of
from inference.benchmark.harness import Harness, Results, Texts
from inference.benchmark.machine import environment_of
from inference.benchmark.method_names import AUTOREGRESSIVE, TRANSFORMERS, methods_of
from inference.benchmark.methods import Method, setting
from inference.benchmark.samples import Sample
from inference.benchmark.settings import ComparisonSettings
from inference.benchmark.transformers_methods import TransformersDecoding
from inference.generation.prompt_file import BenchPrompt, distinct, read_prompts
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
    return _from_all_categories(prompts)[: settings.num_prompts]


class Comparison:
    """A comparison of several methods that decode the same prompts."""

    def __init__(
        self,
        settings: ComparisonSettings,
        prompts: Sequence[BenchPrompt],
        methods: Sequence[Method],
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name_or_path: str,
    ) -> None:
        self.settings = settings
        self.prompts = prompts
        self.methods = methods
        self.model = model
        self.tokenizer = tokenizer
        self.baseline = settings.baseline or _default_baseline(methods)
        target = TargetAdapter(model)
        self.texts = Texts.of(target, tokenizer, settings.max_new_tokens)
        self.texts.require_room(prompts, settings.max_new_tokens)
        self.environment = environment_of(target, name_or_path)

    def run(self, track: Track = untracked) -> ComparisonDocument:
        """Measure all methods, and return the document."""
        harness = Harness(self.methods, self.settings, self.texts, self.model.device)
        # Untimed work that may fail is done first, so that a failure loses no measurement.
        reference = self._reference(harness, track)
        harness.advance = track("Decoding", harness.num_groups(self.prompts))
        results = harness.measure(self.prompts)
        return ComparisonDocument(
            environment=self.environment,
            settings=self.settings,
            prompts=len(
                {sample.prompt for measured in results.values() for sample in measured.samples}
            ),
            is_complete=not harness.is_interrupted,
            baseline=self.baseline,
            methods=tuple(self._figures(results, reference)),
        )

    def _figures(self, results: Results, known: Sequence[Sample]) -> list[MethodFigures]:
        families: dict[str, list[Method]] = {}
        for method in self.methods:
            families.setdefault(method.family, []).append(method)
        figures = []
        measured_at = {temperature for _, temperature in results}
        for temperature in filter(measured_at.__contains__, self.settings.temperatures):
            reference = None
            if not temperature:
                greedy = known or results[str(self._measured_reference), 0.0].samples
                reference = {sample.prompt: sample.token_ids for sample in greedy}
            best = {name: _best(family, temperature, results) for name, family in families.items()}
            baseline = results[best[self.baseline].name, temperature]
            figures += [
                figures_of(
                    method,
                    temperature,
                    results[method.name, temperature],
                    baseline,
                    reference,
                    _rivals(families[name], method, temperature, results),
                )
                for name, method in best.items()
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
        if 0.0 not in self.settings.temperatures or self._measured_reference is not None:
            return []
        method = TransformersDecoding("reference", TRANSFORMERS, self.model)
        advance = track("Greedy answers of the target, not timed", len(self.prompts))
        samples = []
        for prompt in self.prompts:
            samples += harness.decode(method, [prompt], harness.sampling(0.0), 0).samples
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


def _best(methods: Sequence[Method], temperature: float, results: Results) -> Method:
    return max(methods, key=lambda method: results[method.name, temperature].tokens_per_second)


def _rivals(
    methods: Sequence[Method], best: Method, temperature: float, results: Results
) -> list[str]:
    """Return a note on the slower settings of a method; empty if there is only one setting."""
    others = [
        f"{setting(method)}: {results[method.name, temperature].tokens_per_second:.1f} tokens/s"
        for method in methods
        if method is not best
    ]
    if not others:
        return []
    return [f"the fastest of several settings on these samples; the others: {'; '.join(others)}"]
