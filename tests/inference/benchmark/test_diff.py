"""Planted changes between two comparisons are found, and noise is not reported as a change."""

import re
from io import StringIO
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
from helpers.comparisons import noisy_document, with_samples
from rich.console import Console

from inference.benchmark.diff import (
    Changes,
    FigureChange,
    MethodKey,
    Side,
    compare_documents,
    show_changes,
)
from inference.benchmark.document import ComparisonDocument
from jakiro.cli import main
from jakiro.errors import DataError

MINE = MethodKey("drafter=mine", 0.0)
METHOD = ("drafter=mine", 0.0)
NAME = "drafter=mine"


def _changed(document: ComparisonDocument, name: str, **update: Any) -> ComparisonDocument:
    """Return a copy of the document with changed figures of one method."""
    methods = tuple(
        method.model_copy(update=update) if method.name == name else method
        for method in document.methods
    )
    return document.model_copy(update={"methods": methods})


def _figure(changes: Changes, metric: str, key: MethodKey = MINE) -> FigureChange:
    (method,) = (each for each in changes.methods if each.key == key)
    (figure,) = (each for each in method.figures if each.metric == metric)
    return figure


def test_a_document_does_not_differ_from_itself() -> None:
    document = noisy_document(seed=0)
    changes = compare_documents(document, document)
    assert [each.is_paired for each in changes.methods] == [True, True]
    for method in changes.methods:
        for figure in method.figures:
            assert figure.ratio == (1.0, 1.0, 1.0)
            is_verdict = figure.metric != "tokens_per_second"
            assert figure.verdict == (
                "not distinguishable" if is_verdict else "drifts with the machine"
            )
    assert not changes.differences
    assert not changes.no_longer_identical
    assert not changes.only_in


def test_ratios_are_those_of_the_documents_figures() -> None:
    before, after = noisy_document(seed=0), noisy_document(seed=1, slowness={"drafter=mine": 0.7})
    changes = compare_documents(before, after)
    for metric in ("tau", "speedup", "tokens_per_second"):
        old, new = (getattr(each.figures(*MINE), metric) for each in (before, after))
        figure = _figure(changes, metric)
        assert (figure.before, figure.after) == pytest.approx((old, new))
        assert figure.ratio.value == pytest.approx(new / old)
        assert figure.ratio.low <= figure.ratio.value <= figure.ratio.high


def test_a_slowdown_of_one_method_is_found_however_fast_the_machine_was() -> None:
    before = noisy_document(seed=0)
    after = noisy_document(seed=1, slowness={"autoregressive": 0.5, "drafter=mine": 0.5 * 1.25})
    changes = compare_documents(before, after)
    speedup = _figure(changes, "speedup")
    assert speedup.verdict == "slower"
    assert speedup.ratio.low < 0.8 < speedup.ratio.high
    speed = _figure(changes, "tokens_per_second")
    assert speed.ratio.low > 1.4
    assert speed.verdict == "drifts with the machine"
    assert _figure(changes, "tau").verdict == "not distinguishable"


def _alarms(pairs: list[tuple[ComparisonDocument, ComparisonDocument]]) -> int:
    verdicts = [_figure(compare_documents(*pair), "speedup").verdict for pair in pairs]
    return sum(verdict != "not distinguishable" for verdict in verdicts)


def test_prompts_decoded_together_raise_no_more_false_alarms_than_others() -> None:
    """If prompts were resampled one by one, more than half of the pairs would raise alarms."""
    documents = [noisy_document(seed, noise=0.1, prompts=160, batch=8) for seed in range(120)]
    assert _alarms(list(zip(documents[::2], documents[1::2], strict=True))) <= 8
    changes = compare_documents(*documents[:2])
    assert changes.methods[0].is_paired


def test_other_groups_of_the_same_prompts_are_not_paired() -> None:
    before = noisy_document(seed=0, prompts=160, batch=8)
    for after in (
        noisy_document(seed=1, prompts=160, batch=8, order=1),
        noisy_document(seed=1, prompts=160),
    ):
        changes = compare_documents(before, after)
        assert [method.is_paired for method in changes.methods] == [False, False]


def test_few_groups_of_many_prompts_prove_nothing() -> None:
    before = noisy_document(seed=0, prompts=32, batch=8)
    after = noisy_document(seed=1, prompts=32, batch=8, slowness={MINE.name: 2.0})
    assert _figure(compare_documents(before, after), "speedup").verdict == "too few prompts"


def test_noise_alone_is_mostly_not_distinguishable() -> None:
    pairs = [
        [noisy_document(seed + half, noise=0.1) for half in (0, 1)] for seed in range(0, 120, 2)
    ]
    verdicts = [_figure(compare_documents(*pair), "speedup").verdict for pair in pairs]
    assert 51 <= verdicts.count("not distinguishable") < 60


def test_more_tokens_per_forward_are_higher() -> None:
    before = noisy_document(seed=0)
    samples = [
        sample.model_copy(update={"target_forwards": sample.target_forwards - 5})
        for sample in before.figures(*MINE).samples
    ]
    better = with_samples(before.figures(*MINE), samples)
    after = _changed(before, MINE.name, samples=better.samples, tau=better.tau)
    changes = compare_documents(before, after)
    figure = _figure(changes, "tau")
    assert figure.verdict == "higher"
    assert figure.ratio.value == pytest.approx(
        sum(sample.target_forwards + 5 for sample in samples)
        / sum(sample.target_forwards for sample in samples)
    )


def test_the_baseline_has_no_speed_up_to_compare() -> None:
    document = noisy_document(seed=0)
    changes = compare_documents(document, document)
    assert [figure.metric for figure in changes.methods[0].figures] == ["tau", "tokens_per_second"]
    other = document.model_copy(update={"baseline": "drafter=mine"})
    changes = compare_documents(document, other)
    assert [len(method.figures) for method in changes.methods] == [2, 2]  # without speed-ups
    assert [name for name, _, _ in changes.differences] == ["baseline"]


def test_a_method_without_baseline_at_its_temperature_has_no_speed_up() -> None:
    document = noisy_document(seed=0)
    alone = document.model_copy(update={"methods": document.methods[1:]})
    (method,) = compare_documents(document, alone).methods
    assert [figure.metric for figure in method.figures] == ["tau", "tokens_per_second"]


def test_few_prompts_prove_nothing() -> None:
    before = noisy_document(seed=0, prompts=4)
    after = noisy_document(seed=1, prompts=4, slowness={"drafter=mine": 2.0})
    changes = compare_documents(before, after)
    assert {figure.verdict for method in changes.methods for figure in method.figures} == {
        "too few prompts"
    }


def test_a_figure_that_was_zero_has_no_ratio() -> None:
    document = noisy_document(seed=0)
    samples = [
        sample.model_copy(update={"tokens": 2, "target_forwards": 0})
        for sample in document.figures(*MINE).samples
    ]
    stopped = _changed(document, MINE.name, samples=tuple(samples), tau=0.0)
    changes = compare_documents(stopped, document)
    assert _figure(changes, "tau").verdict == "undefined"


def test_methods_of_one_document_are_listed() -> None:
    before = noisy_document(seed=0, methods=("autoregressive", "drafter=old", "drafter=mine"))
    after = noisy_document(seed=0, methods=("autoregressive", "drafter=mine", "ngram"))
    changes = compare_documents(before, after)
    assert [method.key.name for method in changes.methods] == ["autoregressive", "drafter=mine"]
    assert changes.only_in == [("before", ("drafter=old", 0.0)), ("after", ("ngram", 0.0))]


def test_a_method_that_is_no_longer_lossless_is_found() -> None:
    before = noisy_document(seed=0)
    after = _changed(before, MINE.name, identical_to_target=False)
    changes = compare_documents(before, after)
    assert changes.no_longer_identical == (MINE,)
    unknown = _changed(before, MINE.name, identical_to_target=None)
    assert not compare_documents(before, unknown).no_longer_identical
    assert not compare_documents(after, after).no_longer_identical


def test_other_differences_than_figures_are_listed() -> None:
    before = noisy_document(seed=0)
    environment = before.environment
    target = environment.target.model_copy(update={"dtype": "float32"})
    versions = environment.versions | {"torch": "2.14.0", "jakiro": "0.2.0"}
    tree = before.figures(*MINE).tree
    assert tree is not None
    after = _changed(before, MINE.name, tree=tree.model_copy(update={"num_nodes": 99}))
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
            "settings": before.settings.model_copy(
                update={"max_new_tokens": 7, "repeats": 3, "seed": 5, "threads": 1, "packed": True}
            ),
        }
    )
    changes = compare_documents(before, after)
    assert [name for name, _, _ in changes.differences] == [
        *("dtype", "processor", "threads", "spin_count", "torch", "max_new_tokens"),
        *("repeats", "seed", "--threads", "--packed"),
        "tree of drafter=mine at T = 0",
    ]
    assert ("threads", 8, 2) in changes.differences
    assert ("spin_count", "3000", None) in changes.differences
    assert "num_nodes=99" in str(changes.differences[-1])
    without = _changed(before, MINE.name, tree=None)
    ((_, _, tree_after),) = compare_documents(before, without).differences
    assert tree_after is None


@pytest.mark.parametrize(
    "words", [["--method", "autoregressive"], ["--json", "new.json"], ["--batch-size", "2"]]
)
def test_options_with_compare_are_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["bench", "--compare", "a.json", "b.json", *words])
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert f"got: {words[0]}; remedy: leave the other options out" in error


def test_a_command_that_compares_results_without_a_common_method_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, methods in zip(paths, [("autoregressive",), ("transformers",)], strict=True):
        path.write_text(noisy_document(seed=0, methods=methods).model_dump_json())
    with pytest.raises(SystemExit) as exit_info:
        main(["bench", "--compare", *map(str, paths)])
    assert exit_info.value.code == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: the two results cannot be compared: they have no method")
    assert not shown.out


def test_results_of_different_targets_or_prompts_are_refused() -> None:
    before = noisy_document(seed=0)
    target = before.environment.target.model_copy(update={"fingerprint": "e" * 16})
    environment = before.environment.model_copy(update={"target": target})
    with pytest.raises(DataError, match=r"different targets.*target-7b \(f+\).*target-7b \(e+\)"):
        compare_documents(before, before.model_copy(update={"environment": environment}))
    with pytest.raises(DataError, match=r"different prompts.*got: 40 prompts, of which 3"):
        compare_documents(before, noisy_document(seed=1, first=37))
    with pytest.raises(
        DataError, match=r"no method in common.*autoregressive at T = 0.*ngram at T = 0"
    ):
        compare_documents(before, noisy_document(seed=0, methods=("transformers", "ngram")))


def test_many_methods_and_prompts_are_compared_at_once() -> None:
    methods = ("autoregressive", *(f"drafter={number}" for number in range(19)))
    before, after = (noisy_document(seed, methods=methods, prompts=100) for seed in (0, 1))
    start = perf_counter()
    changes = compare_documents(before, after)
    assert perf_counter() - start < 5  # a fraction of a second on an idle machine
    assert len(changes.methods) == 20


def _side(document: ComparisonDocument) -> Side:
    return Side(document.figures(*METHOD), document.figures("autoregressive", 0.0))


def test_the_first_value_of_each_figure_is_the_measured_one() -> None:
    document = noisy_document(seed=0)
    for metric, values in _side(document).resampled(stream=0).items():
        assert values[0] == pytest.approx(getattr(document.figures(*METHOD), metric))
        assert values[1:].min() < values[0] < values[1:].max()


def test_prompts_that_were_decoded_together_are_one_unit() -> None:
    alone = _side(noisy_document(seed=0, prompts=4)).units()
    assert all(unit == prompt for prompt, unit in alone.items())
    paired = _side(noisy_document(seed=0, prompts=4, batch=2)).units()
    assert len(paired) == 4
    assert len(set(paired.values())) == 2
    assert all(prompt in unit.split() for prompt, unit in paired.items())


def test_sides_of_one_stream_share_their_resamples() -> None:
    before = _side(noisy_document(seed=0))
    after = _side(noisy_document(seed=0, slowness={"drafter=mine": 2.0}))
    first, same, other = before.resampled(0), after.resampled(0), after.resampled(1)
    for metric, ratio in {"tau": 1.0, "speedup": 0.5, "tokens_per_second": 0.5}.items():
        np.testing.assert_allclose(same[metric] / first[metric], ratio)
        assert np.std(other[metric] / first[metric]) > 1e-3


def test_the_speed_up_is_resampled_with_the_baseline_of_the_same_prompts() -> None:
    """Hard prompts slow down both the method and its baseline, so the speed-up varies less."""
    values = _side(noisy_document(seed=0, prompts=160, batch=2)).resampled(stream=0)
    spread = {metric: float(np.std(own[1:]) / own[0]) for metric, own in values.items()}
    assert spread["speedup"] < spread["tokens_per_second"] / 3


def test_a_baseline_and_a_method_without_one_have_no_speed_up() -> None:
    figures = noisy_document(seed=0).figures(*METHOD)
    for baseline in (figures, None):
        assert list(Side(figures, baseline).resampled(0)) == ["tau", "tokens_per_second"]


def _table(before: ComparisonDocument, after: ComparisonDocument, width: int = 120) -> str:
    """Return the table of the changes from one document to another, as it is printed."""
    stream = StringIO()
    show_changes(compare_documents(before, after), Console(file=stream, width=width))
    return stream.getvalue()


def _with_mine(document: ComparisonDocument, **update: object) -> ComparisonDocument:
    """Return a copy of the document with changed figures of the drafter."""
    methods = tuple(
        method.model_copy(update=update) if method.name == NAME else method
        for method in document.methods
    )
    return document.model_copy(update={"methods": methods})


def test_the_table_shows_the_verdicts_of_its_figures() -> None:
    methods = ("autoregressive", "drafter=[red]mine")
    before = noisy_document(seed=0, methods=methods)
    after = noisy_document(seed=1, methods=methods, slowness={methods[1]: 1.25})
    printed = " ".join(_table(before, after).split())
    assert "drafter=[red]mine at T = 0 tau 2.3" in printed  # brackets are not markup
    assert "slower tokens/s" in printed
    assert "drifts with the machine" in printed
    assert "different groups" not in printed


def test_no_heading_and_no_figure_folds_over_a_line_break() -> None:
    methods = (
        "autoregressive",
        "drafter=/a/long/path/of/a/run/that/was/called/something/else,tree=auto",
    )
    before, after = (noisy_document(seed, methods=methods) for seed in (0, 1))
    lines = _table(before, after, width=80).splitlines()
    assert f"{methods[1]} at T = 0" in lines
    assert sum(line.startswith("  tokens/s") and "drifts with" in line for line in lines) == 2
    assert all(len(line) <= 80 for line in lines if methods[1] not in line)


def test_a_method_that_is_no_longer_lossless_is_printed_first() -> None:
    before = noisy_document(seed=0)
    printed = _table(before, _with_mine(before, identical_to_target=False))
    assert printed.startswith("NO LONGER LOSSLESS: the tokens of drafter=mine at T = 0")
    assert "NO LONGER LOSSLESS" not in _table(before, before)


def test_few_prompts_have_dashes_and_one_explanation() -> None:
    before, after = (noisy_document(seed, prompts=4) for seed in (0, 1))
    printed = _table(before, after)
    assert "too few" not in printed
    rows = [line for line in printed.splitlines() if re.match("  [a-z]", line)]
    assert len(rows) == 5
    assert all(re.fullmatch(r"  \S+( +[\d.,]+){3} +-", row) for row in rows)
    assert printed.count("Intervals and verdicts need at least 5 prompts.") == 1


def test_the_ratio_to_a_figure_without_value_is_undefined() -> None:
    document = noisy_document(seed=0)
    samples = tuple(
        sample.model_copy(update={"tokens": 2, "target_forwards": 0})
        for sample in document.figures(NAME, 0.0).samples
    )
    printed = _table(_with_mine(document, samples=samples, tau=0.0), document)
    assert re.search(r"  tau .* undefined", printed)


def test_unpaired_methods_and_those_of_one_document_are_named() -> None:
    before = noisy_document(0, prompts=160, methods=("autoregressive", NAME, "drafter=old"))
    after = noisy_document(0, prompts=160, methods=("autoregressive", NAME, "ngram"), batch=8)
    printed = _table(before, after)
    assert "drafter=mine at T = 0 (the prompts were decoded in different" in printed
    assert "Only before: drafter=old at T = 0" in printed
    assert "Only after: ngram at T = 0" in printed


def test_other_differences_stand_below_the_figures() -> None:
    before = noisy_document(seed=0)
    environment = before.environment.model_copy(update={"threads": 2, "spin_count": None})
    printed = _table(before, before.model_copy(update={"environment": environment}))
    below = printed.partition("  tokens/s")[2]
    assert "threads: 8 before, 2 after" in below
    assert "spin_count: 3000 before, None after" in below
