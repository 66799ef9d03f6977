"""What changed between two comparisons: planted changes are found, noise is called noise."""

from collections.abc import Mapping
from io import StringIO
from time import perf_counter
from typing import Any

import numpy as np
import pytest
from helpers.comparisons import make_document
from rich.console import Console

from inference.comparison.change import Changes, FigureChange, MethodKey, compare_documents
from inference.comparison.change_table import show_changes
from inference.comparison.document import ComparisonDocument, MethodFigures, SampleRecord

METHODS = ("plain", "drafter=bank")
BANK = MethodKey("drafter=bank", 0.0)


def _document(
    seed: int,
    slowness: Mapping[str, float] | None = None,
    *,
    noise: float = 0.03,
    hardness: float = 0.3,
    prompts: int = 40,
    first: int = 0,
    methods: tuple[str, ...] = METHODS,
) -> ComparisonDocument:
    """Return a document whose figures are those of its samples.

    Args:
        seed: of the noise; how hard a prompt is does not depend on it.
        slowness: factors of the methods' seconds.
        noise: spread of the seconds of each sample.
        hardness: spread of what prompts take.
        prompts: how many there are.
        first: number of the first prompt.
        methods: drafting ones take half as many forwards as `plain`, the first one.
    """
    source = np.random.default_rng(seed)
    hard = np.random.default_rng(1234 + first).lognormal(0, hardness, prompts)
    document = make_document(methods=methods, prompts=prompts)
    measured = []
    for one in document.methods:
        seconds = hard * source.lognormal(0, noise, prompts) * (slowness or {}).get(one.name, 1.0)
        numbered = enumerate(seconds.tolist(), start=first)
        drafts = one.name != methods[0]
        samples = [_sample(prompt, drafts=drafts, seconds=taken) for prompt, taken in numbered]
        measured.append(_with_samples(one, samples))
    base = measured[0].tokens_per_second
    return document.model_copy(
        update={
            "methods": tuple(
                one.model_copy(update={"speedup": one.tokens_per_second / base}) for one in measured
            )
        }
    )


def _sample(prompt: int, *, drafts: bool, seconds: float) -> SampleRecord:
    forwards = 40 + prompt % 7 if drafts else 100
    return SampleRecord(
        prompt=f"{prompt:08x}",
        category="all",
        repeat=0,
        group=prompt,
        tokens=102,
        decoded=100,
        target_forwards=forwards,
        turns=2,
        seconds=seconds,
        seconds_to_first_token=0.01,
    )


def _with_samples(figures: MethodFigures, samples: list[SampleRecord]) -> MethodFigures:
    tokens = sum(one.tokens for one in samples)
    forwards = sum(one.target_forwards for one in samples)
    return figures.model_copy(
        update={
            "samples": tuple(samples),
            "tokens": tokens,
            "target_forwards": forwards,
            "tau": (tokens - 2 * len(samples)) / forwards,
            "tokens_per_second": tokens / sum(one.seconds for one in samples),
        }
    )


def _changed(document: ComparisonDocument, name: str, **update: Any) -> ComparisonDocument:
    """Return the document with other figures of one method."""
    methods = tuple(
        one.model_copy(update=update) if one.name == name else one for one in document.methods
    )
    return document.model_copy(update={"methods": methods})


def _figure(changes: Changes, metric: str, key: MethodKey = BANK) -> FigureChange:
    (method,) = (one for one in changes.methods if one.key == key)
    (figure,) = (one for one in method.figures if one.metric == metric)
    return figure


def _printed(changes: Changes) -> str:
    stream = StringIO()
    show_changes(changes, Console(file=stream, width=120))
    return stream.getvalue()


def test_a_document_does_not_differ_from_itself() -> None:
    document = _document(seed=0)
    changes = compare_documents(document, document)
    assert [one.is_paired for one in changes.methods] == [True, True]
    for method in changes.methods:
        for figure in method.figures:
            assert figure.ratio == (1.0, 1.0, 1.0)
            assert figure.verdict == "within noise"
    assert not changes.differences
    assert not changes.no_longer_identical
    assert not changes.only_before + changes.only_after


def test_ratios_are_those_of_the_documents_figures() -> None:
    before, after = _document(seed=0), _document(seed=1, slowness={"drafter=bank": 0.7})
    changes = compare_documents(before, after)
    for metric in ("tau", "speedup", "tokens_per_second"):
        old, new = (getattr(one.figures(*BANK), metric) for one in (before, after))
        figure = _figure(changes, metric)
        assert (figure.before, figure.after) == (old, new)
        assert figure.ratio.value == new / old
        assert figure.ratio.low <= figure.ratio.value <= figure.ratio.high


def test_a_slowdown_of_one_method_is_found_however_fast_the_machine_was() -> None:
    before = _document(seed=0)
    after = _document(seed=1, slowness={"plain": 0.5, "drafter=bank": 0.5 * 1.25})
    changes = compare_documents(before, after)
    speedup = _figure(changes, "speedup")
    assert speedup.verdict == "slower"
    assert speedup.ratio.low < 0.8 < speedup.ratio.high
    assert _figure(changes, "tokens_per_second").verdict == "faster"
    assert _figure(changes, "tau").verdict == "within noise"


def test_the_speed_up_is_drawn_with_the_baseline_of_the_same_prompts() -> None:
    """Hard prompts are hard for both, so that the speed-up is known better than the speed."""
    before, after = _document(seed=0), _document(seed=1, first=100)
    changes = compare_documents(before, after)
    width = {
        metric: _figure(changes, metric).ratio.high - _figure(changes, metric).ratio.low
        for metric in ("speedup", "tokens_per_second")
    }
    assert width["speedup"] < width["tokens_per_second"] / 3


def test_other_prompts_are_not_paired_and_known_less_well() -> None:
    before = _document(seed=0)
    paired = compare_documents(before, _document(seed=1))
    unpaired = compare_documents(before, _document(seed=1, first=3))
    assert [one.is_paired for one in unpaired.methods] == [False, False]
    narrow, wide = (_figure(one, "tokens_per_second").ratio for one in (paired, unpaired))
    assert narrow.high - narrow.low < (wide.high - wide.low) / 3
    assert [(one.what, one.after) for one in unpaired.differences] == [
        ("prompts", "40 (37 of them the same)")
    ]


def test_noise_alone_is_mostly_within_noise() -> None:
    pairs = [[_document(seed + half, noise=0.1) for half in (0, 1)] for seed in range(0, 120, 2)]
    verdicts = [_figure(compare_documents(*pair), "speedup").verdict for pair in pairs]
    assert 51 <= verdicts.count("within noise") < 60


def test_more_tokens_per_forward_are_higher() -> None:
    before = _document(seed=0)
    samples = [
        one.model_copy(update={"target_forwards": one.target_forwards - 5})
        for one in before.figures(*BANK).samples
    ]
    better = _with_samples(before.figures(*BANK), samples)
    after = _changed(before, BANK.name, samples=better.samples, tau=better.tau)
    changes = compare_documents(before, after)
    figure = _figure(changes, "tau")
    assert figure.verdict == "higher"
    assert figure.ratio.value == pytest.approx(
        sum(one.target_forwards + 5 for one in samples)
        / sum(one.target_forwards for one in samples)
    )


def test_the_baseline_has_no_speed_up_to_compare() -> None:
    document = _document(seed=0)
    changes = compare_documents(document, document)
    assert [one.metric for one in changes.methods[0].figures] == ["tau", "tokens_per_second"]
    assert changes.num_intervals == 5
    other = document.model_copy(update={"baseline": "drafter=bank"})
    changes = compare_documents(document, other)
    assert len(changes.methods[0].figures) == len(changes.methods[1].figures) == 3
    assert [one.what for one in changes.differences] == ["baseline"]


def test_a_method_without_baseline_at_its_temperature_has_no_speed_up() -> None:
    document = _document(seed=0)
    alone = document.model_copy(update={"methods": document.methods[1:]})
    (method,) = compare_documents(document, alone).methods
    assert [one.metric for one in method.figures] == ["tau", "tokens_per_second"]


def test_few_prompts_are_no_evidence() -> None:
    before = _document(seed=0, prompts=4)
    after = _document(seed=1, prompts=4, slowness={"drafter=bank": 2.0})
    changes = compare_documents(before, after)
    assert {one.verdict for method in changes.methods for one in method.figures} == {
        "too few prompts"
    }
    assert changes.num_intervals == 0
    assert "by chance" not in _printed(changes)


def test_a_figure_that_was_zero_has_no_ratio() -> None:
    document = _document(seed=0)
    samples = [
        one.model_copy(update={"tokens": 2, "target_forwards": 0})
        for one in document.figures(*BANK).samples
    ]
    stopped = _changed(document, BANK.name, samples=tuple(samples), tau=0.0)
    changes = compare_documents(stopped, document)
    assert _figure(changes, "tau").verdict == "undefined"
    assert "undefined" in _printed(changes)


def test_methods_of_one_document_are_listed() -> None:
    before = _document(seed=0, methods=("plain", "drafter=old", "drafter=bank"))
    after = _document(seed=0, methods=("plain", "drafter=bank", "ngram"))
    changes = compare_documents(before, after)
    assert [one.key.name for one in changes.methods] == ["plain", "drafter=bank"]
    assert changes.only_before == (("drafter=old", 0.0),)
    assert changes.only_after == (("ngram", 0.0),)
    printed = _printed(changes)
    assert "Only before: drafter=old at T = 0." in printed
    assert "Only after: ngram at T = 0." in printed


def test_a_lost_identity_is_told_first() -> None:
    before = _document(seed=0)
    after = _changed(before, BANK.name, identical_to_target=False)
    changes = compare_documents(before, after)
    assert changes.no_longer_identical == (BANK,)
    assert _printed(changes).startswith("NOT LOSSLESS ANY MORE: drafter=bank at T = 0")
    unknown = _changed(before, BANK.name, identical_to_target=None)
    assert not compare_documents(before, unknown).no_longer_identical
    assert not compare_documents(after, after).no_longer_identical


def test_what_differs_beside_the_figures_is_listed_the_target_first() -> None:
    before = _document(seed=0)
    environment = before.environment
    target = environment.target.model_copy(update={"fingerprint": "e" * 16, "dtype": "float32"})
    versions = environment.versions | {"torch": "2.14.0", "jakiro": "0.2.0"}
    tree = before.figures(*BANK).tree
    assert tree is not None
    after = _changed(before, BANK.name, tree=tree.model_copy(update={"num_nodes": 99}))
    after = after.model_copy(
        update={
            "environment": environment.model_copy(
                update={
                    "target": target,
                    "versions": versions,
                    "threads": 2,
                    "processor": "Another",
                    "spin_count": None,
                }
            ),
            "settings": before.settings.model_copy(update={"max_new_tokens": 7}),
        }
    )
    changes = compare_documents(before, after)
    assert [one.what for one in changes.differences] == [
        *("target", "dtype", "processor", "threads", "spin count", "torch", "max_new_tokens"),
        "tree of drafter=bank at T = 0",
    ]
    assert [one.is_serious for one in changes.differences] == [True] + 7 * [False]
    printed = _printed(changes)
    assert printed.startswith("ANOTHER TARGET: organisation/target-7b (ffffffffffffffff) before")
    assert "threads: 8 before, 2 after" in printed
    assert "spin count: 3000 before, none after" in printed
    assert f"num_nodes={tree.num_nodes} before, num_nodes=99 after" in printed
    without = _changed(before, BANK.name, tree=None)
    (difference,) = compare_documents(before, without).differences
    assert difference.after == "not fixed"


def test_the_table_says_what_its_figures_are_worth() -> None:
    methods = ("plain", "drafter=[red]bank")
    before = _document(seed=0, methods=methods)
    after = _document(seed=1, methods=methods, slowness={methods[1]: 1.25})
    printed = " ".join(_printed(compare_documents(before, after)).split())
    assert "drafter=[red]bank at T = 0 tau 2.3" in printed  # brackets are no markup
    assert "slower tokens/s" in printed
    assert "Of 5 intervals about 0.2 exclude 1 by chance" in printed
    assert "drift with the machine" in printed
    assert "other prompts" not in printed
    printed = _printed(compare_documents(before, _document(seed=1, methods=methods, first=3)))
    assert "plain at T = 0, other prompts" in printed
    assert "Where prompts differ" in printed


def test_documents_without_a_common_method_are_compared_to_no_end() -> None:
    before = _document(seed=0, methods=("plain", "ngram"))
    after = _document(seed=0, methods=("transformers", "drafter=bank"))
    printed = _printed(compare_documents(before, after))
    assert "No method was measured in both." in printed
    assert "ratio" not in printed


def test_many_methods_and_prompts_are_compared_at_once() -> None:
    methods = ("plain", *(f"drafter={number}" for number in range(19)))
    before, after = (_document(seed, methods=methods, prompts=100) for seed in (0, 1))
    start = perf_counter()
    changes = compare_documents(before, after)
    assert perf_counter() - start < 5  # a fraction of a second on an idle machine
    assert len(changes.methods) == 20
