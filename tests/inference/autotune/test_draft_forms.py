"""The forms of a drafter are measured once, and only those that are possible can be selected."""

from pathlib import Path

import pytest
from helpers.models import tiny_drafter, tiny_llama, tiny_settings

from inference import SpeculativeDecoder
from inference.autotune import draft_forms
from inference.autotune.draft_forms import fastest_head, known_forms, measure_forms, with_forms
from inference.drafters.lookup import LookupDrafter
from inference.drafters.trained.drafter import TrainedDrafter
from inference.drafters.trained.forms import (
    OWN_FORMS,
    DraftForms,
    can_pack_layers,
    check_forms,
    head_forms,
)
from inference.loading import combined_drafter
from inference.trees.shape import TreeShape
from jakiro.draft_head import HeadForm
from jakiro.target.adapter import TargetAdapter


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({"own": 1.0}, "own"),
        ({"own": 1.0, "packed": 0.5, "int8": 0.4}, "int8"),
        ({"own": 1.0, "packed": 0.5, "int8": 0.45}, "packed"),
        ({"own": 0.5, "packed": 0.6, "int8": 0.45}, "own"),
        ({"own": 1.2, "int8": 1.0}, "int8"),
        ({"own": 1.0, "packed": 0.9}, "packed"),
    ],
)
def test_int8_must_be_clearly_faster_than_the_others(
    seconds: dict[HeadForm, float], expected: HeadForm
) -> None:
    assert fastest_head(seconds) == expected


def test_the_fastest_of_the_possible_forms_is_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    target = TargetAdapter(tiny_llama())
    model = tiny_drafter(target, tiny_settings(draft_vocab_size=9))
    check_forms(measure_forms(target, model), target, model)
    measured: list[list[object]] = []

    def last_is_fastest(works: dict[object, object]) -> dict[object, float]:
        measured.append(list(works))
        return {name: 1.0 / rank for rank, name in enumerate(works, start=1)}

    monkeypatch.setattr(draft_forms, "_medians", last_is_fastest)
    forms = measure_forms(target, model)
    allowed = head_forms(target)
    assert forms == DraftForms(head=allowed[-1], packed=can_pack_layers(model))
    assert list(allowed) in measured


def test_functions_take_turns() -> None:
    order: list[str] = []
    works = {name: lambda name=name: order.append(name) for name in ("a", "b")}
    medians = draft_forms._medians(works)
    assert order == ["a", "b"] * draft_forms.REPEATS
    assert set(medians) == {"a", "b"}
    assert all(seconds > 0 for seconds in medians.values())


def test_forms_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = TargetAdapter(tiny_llama())
    model = tiny_drafter(target)
    monkeypatch.setattr("inference.autotune.measurement.QUIET", float("inf"))
    first = known_forms(target, model, tmp_path)
    monkeypatch.setattr(draft_forms, "measure_forms", None)
    assert known_forms(target, model, tmp_path) == first
    drafter = TrainedDrafter(model, target, TreeShape())
    assert with_forms(drafter, "auto", tmp_path).forms == first
    assert [path.name[:6] for path in tmp_path.iterdir()] == ["forms-"]


def test_where_nothing_else_is_possible_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_forms, "head_forms", lambda *_: ("own",))
    monkeypatch.setattr(draft_forms, "can_pack_layers", lambda _: False)
    target = TargetAdapter(tiny_llama())
    assert known_forms(target, tiny_drafter(target), tmp_path) == OWN_FORMS
    assert not list(tmp_path.iterdir())


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


def test_costs_are_measured_with_the_forms_of_the_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference.autotune.measurement.user_cache_path", lambda _: tmp_path)
    monkeypatch.setattr("inference.autotune.measurement.QUIET", float("inf"))
    target = TargetAdapter(tiny_llama(vocab=11))
    forms = DraftForms(head=head_forms(target)[-1])
    used: list[DraftForms] = []
    original = TrainedDrafter.__init__

    def noted(self: TrainedDrafter, *arguments: object, **named: object) -> None:
        original(self, *arguments, **named)  # type: ignore[arg-type]
        used.append(self.forms)

    monkeypatch.setattr(TrainedDrafter, "__init__", noted)
    drafter = tiny_drafter(target)
    for repeat in range(2):
        SpeculativeDecoder(target.model, drafter, tree="auto", draft_forms=forms)
        assert len(list(tmp_path.iterdir())) == 1
        assert set(used[2 - 2 * repeat :]) <= {OWN_FORMS, forms}
    assert used.count(forms) > 2
    SpeculativeDecoder(target.model, drafter, tree="auto")
    assert len(list(tmp_path.iterdir())) == 2
