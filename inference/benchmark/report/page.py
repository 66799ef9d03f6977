"""Rendering of the document of a comparison as a single HTML page."""

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from inference.benchmark.document import ComparisonDocument, ExampleTree, MethodFigures
from inference.benchmark.report import plots, style
from inference.benchmark.report.style import ELLIPSIS, PHASES, Looks, expert_color, looks
from inference.benchmark.report.tree_picture import draw_tree
from inference.benchmark.report.verdict import fastest, has_too_few, step_cost, verdict
from inference.benchmark.stats import FEWEST_PROMPTS

_TEMPLATE = "report.html.jinja"
_FILTERS: tuple[Callable[..., str], ...] = (
    *(style.fixed, style.significant, style.milliseconds, style.percent),
    *(style.size, style.interval, style.breakable, style.verbatim, style.anchor, expert_color),
)
# Figures of all temperatures share a scale if the times differ by at most this factor.
_SCALE_RATIO = 1.5
MOST_SHOWN = 20  # prompts on a page
_LONGEST_TITLE = 90  # characters


@dataclass(frozen=True)
class Panel:
    """A figure and its title."""

    title: str
    figure: Markup


@dataclass(frozen=True)
class Group:
    """All methods at a temperature.

    Attributes:
        temperature: sampling temperature; 0 is greedy.
        title: title of the temperature's part of each section.
        verdict: summary of the figures in sentences.
        methods: figures of the methods; if prompts are too few, intervals contain only the measured
            value.
        categories: categories of prompts; empty if there is only one category.
        fastest: name of the method that is shown to be faster than all other methods; None if there
            is no such method.
    """

    temperature: float
    title: str
    verdict: Markup
    methods: tuple[MethodFigures, ...]
    categories: tuple[str, ...]
    fastest: str | None

    @property
    def drafting(self) -> tuple[MethodFigures, ...]:
        """The methods that draft."""
        return tuple(method for method in self.methods if method.conditional_acceptance_rate)

    def step_cost(self, figures: MethodFigures) -> float | None:
        """Return how many autoregressive steps a method's decoding step takes; None if unknown.

        Args:
            figures: figures of the method.
        """
        return step_cost(figures, self.methods)

    @property
    def with_experts(self) -> tuple[MethodFigures, ...]:
        """The methods with figures of several experts."""
        return tuple(method for method in self.methods if len(method.experts) > 1)


def render(document: ComparisonDocument) -> str:
    """Return a page that needs no other file; the same document always gives the same page."""
    look = looks(document)
    groups = _groups(document, look)
    template = _environment().get_template(_TEMPLATE)
    return template.render(
        document=document,
        settings=document.settings.model_dump(mode="json"),
        groups=groups,
        looks=look,
        phases=PHASES,
        experts=sorted({expert.expert for method in document.methods for expert in method.experts}),
        trees=[(tree, draw_tree(tree)) for tree in document.trees],
        tree_experts=_tree_experts,
        interval=style.interval,
        command=shlex.join(document.environment.argv),
        exchanges=exchanges_of(document),
        fewest_prompts=FEWEST_PROMPTS,
        lacks_intervals=any(map(_has_too_few, document.methods)),
        lacks_category_intervals=_lacks_category_intervals(document),
        titles={group.temperature: group.title for group in groups},
        described=_described(document),
        **_panels(document, groups, look),
    )


def _environment() -> Environment:
    """Return a jinja environment that escapes invisible characters."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {function.__name__: function for function in _FILTERS}
    return environment


def _shown(value: Any) -> Any:
    is_text = isinstance(value, str) and not isinstance(value, Markup)
    return style.printable(value) if is_text else value


def _groups(document: ComparisonDocument, look: Looks) -> list[Group]:
    return [
        _group(document, temperature, look)
        for temperature in dict.fromkeys(method.temperature for method in document.methods)
    ]


def _group(document: ComparisonDocument, temperature: float, look: Looks) -> Group:
    methods = tuple(method for method in document.methods if method.temperature == temperature)
    best = fastest([method for method in methods if method.name != document.baseline])
    return Group(
        temperature,
        title=f"Temperature {temperature:g}" if temperature else "Greedy (temperature 0)",
        verdict=verdict(document, temperature, look),
        methods=tuple(map(_without_false_findings, methods)),
        categories=tuple(dict.fromkeys(name for method in methods for name in method.categories)),
        fastest=None if best is None else best.name,
    )


def _has_too_few(method: MethodFigures, category: str | None = None) -> bool:
    """Return whether a method's prompts, or those of a category, are too few for intervals."""
    return has_too_few(
        sample for sample in method.samples if category is None or sample.category == category
    )


def _lacks_category_intervals(document: ComparisonDocument) -> bool:
    return any(
        _has_too_few(method, category)
        for method in document.methods
        for category in method.categories
    )


def _without_false_findings(method: MethodFigures) -> MethodFigures:
    """Return the figures; if prompts are too few, intervals contain only the measured value."""
    categories = {
        name: figures.model_copy(update=_collapsed(figures.speedup, "speedup"))
        if _has_too_few(method, name)
        else figures
        for name, figures in method.categories.items()
    }
    few = _collapsed(method.speedup, "speedup") | _collapsed(method.tau, "tau")
    update = {"categories": categories} | (few if _has_too_few(method) else {})
    return method.model_copy(update=update)


def _collapsed(value: float, name: str) -> dict[str, float]:
    return {f"{name}_low": value, f"{name}_high": value}


def _panels(
    document: ComparisonDocument, groups: Sequence[Group], look: Looks
) -> dict[str, list[Panel]]:
    """Return the panels of every section.

    Panels of a section have the same scale, except times that differ much between temperatures.
    """
    everything = [method for group in groups for method in group.methods]
    baseline = document.baseline
    fastest = plots.largest(max(method.speedup, method.speedup_high, 1.0) for method in everything)
    slowest = [plots.largest(map(plots.token_milliseconds, group.methods)) for group in groups]
    is_common = max(slowest) <= _SCALE_RATIO * min(slowest)
    limits = [max(slowest) if is_common else own for own in slowest]
    sample_limit = plots.sample_limit(everything)
    figures: dict[str, tuple[str, Callable[..., Markup], dict[str, Any]]] = {
        "speedups": ("methods", plots.speedups, {"limit": fastest, "baseline": baseline}),
        "acceptance": ("drafting", plots.acceptance, {}),
        "expert_loads": ("with_experts", plots.expert_load, {}),
        "samples": ("methods", plots.sample_speeds, {"limit": sample_limit}),
    }
    panels = {
        section: [
            Panel(group.title, draw(methods, looks=look, name=f"{section}-{index}", **details))
            for index, group in enumerate(groups)
            if (methods := getattr(group, which))
        ]
        for section, (which, draw, details) in figures.items()
    }
    panels["times"] = [
        Panel(group.title, plots.times(group.methods, look, limit, name=f"times-{index}"))
        for index, (group, limit) in enumerate(zip(groups, limits, strict=True))
    ]
    return panels


def _tree_experts(tree: ExampleTree) -> list[int]:
    """Return the experts of a tree; none if there is only one, as with drafters without experts."""
    experts = sorted({node.expert for node in tree.nodes})
    return experts if len(experts) > 1 else []


def _described(document: ComparisonDocument) -> list[tuple[MethodFigures, list[str], list[str]]]:
    """Return each method once, with its trees and its notes at all temperatures."""
    found: dict[str, list[MethodFigures]] = {}
    for method in document.methods:
        found.setdefault(method.name, []).append(method)
    return [
        (
            methods[0],
            _unique(map(_tree, methods)),
            _unique(note for method in methods for note in method.notes),
        )
        for methods in found.values()
    ]


def _unique(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(text for text in texts if text))


def _tree(figures: MethodFigures) -> str:
    tree = figures.tree
    if tree is None:
        return ""
    size = "sampled" if tree.sampled else f"best {tree.num_nodes}"
    return (
        f"{size}, depth {tree.autoregressive_levels} + {tree.parallel_levels},"
        f" {tree.children} children, breadth {tree.breadth}"
    )


class SharedAnswer(NamedTuple):
    """An answer, and the methods that gave it at a temperature."""

    temperature: float
    methods: list[str]
    text: str


class Exchange(NamedTuple):
    """A prompt and its answers."""

    title: str  # beginning of the question, on one line
    question: str
    answers: list[SharedAnswer]


def exchanges_of(document: ComparisonDocument) -> list[Exchange]:
    """Return the first prompts with their answers; empty if the document has no texts."""
    answers: dict[str, dict[tuple[float, str], list[str]]] = {}
    for method in document.methods:
        for sample in method.samples:
            if sample.answer is not None and sample.prompt in document.questions:
                own = answers.setdefault(sample.prompt, {})
                own.setdefault((method.temperature, sample.answer), []).append(method.name)
    shown = [prompt for prompt in document.questions if prompt in answers][:MOST_SHOWN]
    return [
        Exchange(
            _title(document.questions[prompt]),
            document.questions[prompt],
            [SharedAnswer(at, methods, text) for (at, text), methods in answers[prompt].items()],
        )
        for prompt in shown
    ]


def _title(question: str) -> str:
    line = " ".join(question.split())
    return line if len(line) <= _LONGEST_TITLE else line[: _LONGEST_TITLE - 1] + ELLIPSIS
