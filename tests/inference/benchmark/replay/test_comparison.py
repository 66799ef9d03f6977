"""A replay has the figures of decoding, pools trainings, and refuses what it cannot compare."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.mixed_prompts import RECORDS, write_target_and_prompts
from helpers.models import tiny_drafter

from inference.benchmark.harness import grouped
from inference.benchmark.method_names import parse_methods
from inference.benchmark.replay.comparison import Replay, prompts_of
from inference.benchmark.replay.document import (
    ReplayDocument,
    ReplayedPrompt,
    ReplaySettings,
)
from inference.benchmark.run import Comparison, prompts_for
from inference.benchmark.settings import ComparisonSettings
from inference.benchmark.subject import Subject, build_methods, load_target
from inference.generation.prompt_file import BenchPrompt
from jakiro.errors import ConfigError, PromptError
from jakiro.utils.tracking import Track

TREES = "candidates=60"
Replayed = Callable[..., ReplayDocument]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, three drafters and a file of prompts."""
    path = tmp_path_factory.mktemp("replay")
    target = write_target_and_prompts(path)
    for seed in range(3):
        tiny_drafter(target, seed=seed).save_pretrained(path / f"drafter-{seed}")
    return path


@pytest.fixture(scope="module")
def subject(folder: Path) -> Subject:
    return Subject(*load_target(str(folder / "target"), "float32", torch.device("cpu")))


@pytest.fixture(scope="module")
def replayed(folder: Path, subject: Subject) -> Replayed:
    """A function that replays the drafters with the given names, which have rising numbers."""

    def run(*names: str, **changes: Any) -> ReplayDocument:
        settings = _settings(folder, *names, **changes)
        return Replay(settings, prompts_of(settings), subject, "tiny").run()

    return run


@pytest.fixture(scope="module")
def whole(replayed: Replayed) -> ReplayDocument:
    """The results of two drafters at two temperatures."""
    document = replayed("a", "b", temperatures=(0.0, 1.0), batch_size=1)
    assert document.is_complete
    return document


def _settings(folder: Path, *names: str, **changes: Any) -> ReplaySettings:
    drafters = [f"{name}={folder / f'drafter-{number}'}" for number, name in enumerate(names)]
    fields = {
        "drafters": tuple(drafters),
        "trees": (TREES,),
        "prompts": str(folder / "prompts.jsonl"),
        "max_new_tokens": 7,
    }
    return ReplaySettings(**fields | changes)


def test_greedy_figures_are_those_of_decoding(
    folder: Path, subject: Subject, replayed: Replayed
) -> None:
    drafter = f"drafter={folder / 'drafter-0'},{TREES}"
    settings = ComparisonSettings(
        methods=(drafter,), prompts=str(folder / "prompts.jsonl"), max_new_tokens=7
    )
    methods = build_methods(parse_methods([drafter]), subject)
    model, tokenizer = subject.model, subject.tokenizer
    prompts = prompts_for(settings)
    decoded = Comparison(settings, prompts, methods, model, tokenizer, "tiny").run().methods[0]
    (row,) = replayed("only", batch_size=3).rows
    assert row.tau.value == pytest.approx(decoded.tau)
    assert row.conditional_acceptance_rate == decoded.conditional_acceptance_rate
    assert {(own.prompt, own.category, own.decoded, own.steps) for own in row.counts[0]} == {
        (own.prompt, own.category, own.decoded, own.target_forwards) for own in decoded.samples
    }


def test_all_drafters_get_the_same_texts_and_the_first_is_the_baseline(replayed: Replayed) -> None:
    trees = (TREES, "candidates=20,levels=1")
    document = replayed("a", "b", temperatures=(0.0, 1.0), trees=trees)
    found = [(row.drafter, row.temperature, row.trees) for row in document.rows]
    assert found == [(name, t, kind) for t in (0.0, 1.0) for kind in trees for name in "ab"]
    for first, second in zip(document.rows[::2], document.rows[1::2], strict=True):
        assert first.ratio.value == 1.0
        assert second.ratio.value == pytest.approx(second.tau.value / first.tau.value)
        assert [own.decoded for own in first.counts[0]] == [own.decoded for own in second.counts[0]]
    levels = {row.trees: len(row.conditional_acceptance_rate) for row in document.rows}
    assert levels[trees[1]] < levels[TREES]
    num_turns = sum(len(record.get("turns", "1")) for record in RECORDS)
    assert document.tokens == {0.0: 7 * num_turns, 1.0: 7 * num_turns}
    assert ReplayDocument.model_validate_json(document.model_dump_json()) == document


def test_trainings_with_the_same_name_are_pooled(replayed: Replayed) -> None:
    (row,) = replayed("a", "a", "a").rows
    totals = [(sum(p.decoded for p in own), sum(p.steps for p in own)) for own in row.counts]
    assert len(row.counts) == 3
    assert row.tau.by_seed == pytest.approx([decoded / steps for decoded, steps in totals])
    decoded, steps = map(sum, zip(*totals, strict=True))
    assert row.tau.value == pytest.approx(decoded / steps)
    assert row.tau.low < row.tau.value < row.tau.high


def test_categories_with_enough_prompts_have_results_of_their_own(
    folder: Path, replayed: Replayed
) -> None:
    sizes = {"code": 6, "chat": 5, "rare": 4}
    records = [
        {"prompt": f"{name} {number}", "category": name}
        for name, size in sizes.items()
        for number in range(size)
    ]
    path = folder / "categories.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    base, row = replayed("a", "b", prompts=str(path)).rows
    assert list(row.categories) == ["code", "chat"]
    for name, found in row.categories.items():
        tau = {own.drafter: _tau_of(own.counts[0], name) for own in (base, row)}
        assert found.prompts == sizes[name]
        assert found.tau.value == pytest.approx(tau["b"])
        assert found.ratio.value == pytest.approx(tau["b"] / tau["a"])
        assert found.tau.low < found.tau.value < found.tau.high
    assert not replayed("a", prompts=str(path), num_prompts=6).rows[0].categories


def _tau_of(counts: Sequence[ReplayedPrompt], category: str) -> float:
    own = [count for count in counts if count.category == category]
    return sum(count.decoded for count in own) / sum(count.steps for count in own)


@pytest.mark.parametrize("last", range(3, 31))
def test_an_interrupted_replay_has_the_prompts_that_all_drafters_replayed(
    last: int, folder: Path, subject: Subject, whole: ReplayDocument
) -> None:
    settings = _settings(folder, "a", "b", temperatures=(0.0, 1.0), batch_size=1)
    replay = Replay(settings, prompts_of(settings), subject, "tiny")
    # A prompt has three steps at each temperature: the text is written, and replayed twice.
    prompts = {0.0: (last + 2) // 6, 1.0: (last - 1) // 6}
    expected = {t: count for t, count in prompts.items() if count >= 2}
    if not expected:
        with pytest.raises(KeyboardInterrupt):
            replay.run(_interrupted_after(last))
        return
    found = replay.run(_interrupted_after(last))
    assert not found.is_complete
    assert found.prompts == prompts[0.0]
    assert list(found.tokens) == list(expected)
    assert len(found.rows) == 2 * len(expected)
    for own, same in zip(found.rows, whole.rows, strict=False):
        assert (own.drafter, own.temperature) == (same.drafter, same.temperature)
        assert len(own.counts[0]) == expected[own.temperature]
        assert set(own.counts[0]) <= set(same.counts[0])
        turns = sum(count.decoded // 6 for count in own.counts[0])  # the first token is not counted
        assert found.tokens[own.temperature] == 7 * turns
    assert ReplayDocument.model_validate_json(found.model_dump_json()) == found


def test_prompts_are_visited_in_a_random_order_with_the_seeds_of_their_places(
    folder: Path, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, visited = Replay._written, []

    def noted(own: Replay, group: Sequence[BenchPrompt], temperature: float, seed: int) -> Any:
        visited.append((group[0].fingerprint, temperature, seed))
        return written(own, group, temperature, seed)

    monkeypatch.setattr(Replay, "_written", noted)
    settings = _settings(folder, "a", temperatures=(0.0, 1.0), batch_size=1)
    prompts = prompts_of(settings)
    Replay(settings, prompts, subject, "tiny").run()
    shared = ComparisonSettings(methods=("autoregressive",), prompts="any", batch_size=1)
    in_order = [
        (group[0].fingerprint, temperature, 1000 * number)
        for number, group in enumerate(grouped(prompts, shared))
        for temperature in settings.temperatures
    ]
    assert visited != in_order
    assert sorted(visited) == sorted(in_order)
    assert [own[1] for own in visited] == [0.0, 1.0] * len(prompts)  # one prompt after the other


def test_prompts_without_decoded_tokens_are_not_enough_for_an_interval(
    folder: Path, subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Replay, "_written", _only_first_tokens)
    settings = _settings(folder, "a", batch_size=1)
    with pytest.raises(KeyboardInterrupt):
        Replay(settings, prompts_of(settings), subject, "tiny").run(_interrupted_after(8))


def _only_first_tokens(
    own: Replay, group: Sequence[BenchPrompt], *args: Any, written: Any = Replay._written
) -> Any:
    return [text._replace(answer=text.answer[:1]) for text in written(own, group, *args)]


def _interrupted_after(last: int) -> Track:
    """Return a `track` whose progress raises KeyboardInterrupt at a step."""

    def track(name: str, num_steps: int) -> Callable[[], None]:
        steps = iter(range(1, num_steps + 1))

        def advance() -> None:
            if next(steps) == last:
                raise KeyboardInterrupt

        return advance

    return track


def test_a_single_prompt_has_no_interval(folder: Path) -> None:
    with pytest.raises(ConfigError, match="2 or more different prompts"):
        prompts_of(_settings(folder, "a", num_prompts=1))


def test_prompts_without_room_for_answers_are_refused(folder: Path, subject: Subject) -> None:
    settings = _settings(folder, "a", max_new_tokens=250)
    with pytest.raises(PromptError, match="do not fit"):
        Replay(settings, prompts_of(settings), subject, "tiny")
