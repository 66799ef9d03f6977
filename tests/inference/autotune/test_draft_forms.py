"""The forms of a drafter are measured once, and only those that are possible can be selected."""

from pathlib import Path

import pytest
from helpers.models import tiny_drafter, tiny_llama, tiny_settings

from inference import SpeculativeDecoder
from inference.autotune import draft_forms
from inference.autotune.draft_forms import (
    fastest_form,
    known_form_seconds,
    measure_forms,
    with_forms,
)
from inference.drafters.lookup import LookupDrafter
from inference.drafters.trained.converted import layer_forms
from inference.drafters.trained.drafter import TrainedDrafter
from inference.drafters.trained.forms import (
    DraftForms,
    check_forms,
    head_forms,
)
from inference.loading import combined_drafter
from inference.trees.shape import TreeShape
from jakiro.target.adapter import TargetAdapter
from jakiro.target.weight_forms import WeightForm


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({}, "own"),
        ({"own": 1.0, "packed": 0.5, "int8": 0.4}, "int8"),
        ({"own": 1.0, "packed": 0.5, "int8": 0.45}, "packed"),
        ({"own": 0.5, "packed": 0.6, "int8": 0.45}, "own"),
        ({"own": 1.0, "packed": 0.9, "bfloat16": 0.89, "int8": 0.8}, "bfloat16"),
    ],
)
def test_int8_must_be_clearly_faster_than_the_others(
    seconds: dict[WeightForm, float], expected: WeightForm
) -> None:
    assert fastest_form(seconds) == expected


def test_the_fastest_of_the_possible_forms_is_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    target = TargetAdapter(tiny_llama())
    model = tiny_drafter(target, tiny_settings(draft_vocab_size=9))
    check_forms(measure_forms(target, model).fastest, target, model)
    measured: list[list[object]] = []
    heads, layers = head_forms(target), layer_forms(model)[:-1] or ("own",)
    fastest = heads[-1], layers[-1]

    def timed(works: dict[object, object]) -> dict[object, float]:
        measured.append(list(works))
        wanted = fastest[len(measured) - 1]
        return {name: 1.0 if name == wanted else 2.0 for name in works}

    monkeypatch.setattr(draft_forms, "_medians", timed)
    monkeypatch.setattr(draft_forms, "layer_forms", lambda _: layers)
    assert measure_forms(target, model).fastest == DraftForms(head=fastest[0], layers=fastest[1])
    assert measured == [list(heads), list(layers)]


def test_forms_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = TargetAdapter(tiny_llama())
    model = tiny_drafter(target)
    monkeypatch.setattr("inference.autotune.measurement.QUIET", float("inf"))
    first = known_form_seconds(target, model, tmp_path)
    monkeypatch.setattr(draft_forms, "measure_forms", None)
    assert known_form_seconds(target, model, tmp_path) == first
    drafter = TrainedDrafter(model, target, TreeShape())
    assert with_forms(drafter, "auto", tmp_path).forms == first.fastest
    assert [path.name[:6] for path in tmp_path.iterdir()] == ["forms-"]


def test_decoders_and_pairs_measure_forms_with_auto(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference.autotune.measurement.user_cache_path", lambda _: tmp_path)
    model = tiny_llama(vocab=11)
    trained = tiny_drafter(TargetAdapter(model))
    pair = combined_drafter(trained, LookupDrafter(), model, draft_forms="auto")
    decoder = SpeculativeDecoder(model, trained, draft_forms="auto", tree="fixed")
    assert isinstance(decoder.drafter, TrainedDrafter)
    assert isinstance(pair.first, TrainedDrafter)
    assert decoder.drafter.forms == pair.first.forms  # from the cache
    expected = SpeculativeDecoder(model).generate([1, 2, 3], max_new_tokens=15)
    for drafting in (decoder, SpeculativeDecoder(model, pair, tree="fixed")):
        got = drafting.generate([1, 2, 3], max_new_tokens=15)
        assert got.new_token_ids == expected.new_token_ids
    assert SpeculativeDecoder(model, LookupDrafter(), draft_forms="auto", tree="fixed").plan is None
