"""A replay has the figures of decoding, pools trainings, and refuses what it cannot compare."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.mixed_prompts import RECORDS, write_target_and_prompts
from helpers.models import tiny_drafter

from inference.benchmark.method_names import parse_methods
from inference.benchmark.replay.comparison import Replay, ReplayDocument
from inference.benchmark.run import Comparison, prompts_for
from inference.benchmark.settings import ComparisonSettings
from inference.benchmark.subject import Subject, build_methods, load_target
from jakiro.errors import PromptError

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

    def run(*names: str, options: str = TREES, **changes: Any) -> ReplayDocument:
        methods = tuple(
            f"drafter={folder / f'drafter-{number}'},{options},name={name}"
            for number, name in enumerate(names)
        )
        fields: dict[str, Any] = {"prompts": str(folder / "prompts.jsonl"), "max_new_tokens": 7}
        settings = ComparisonSettings(methods=methods, **fields | changes)
        return Replay(settings, subject, "tiny").run()

    return run


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
    document = replayed("a", "b", temperatures=(0.0, 1.0), batch_size=8)
    found = [(row.drafter, row.temperature) for row in document.rows]
    assert found == [(name, temperature) for temperature in (0.0, 1.0) for name in "ab"]
    for first, second in zip(document.rows[::2], document.rows[1::2], strict=True):
        assert first.ratio.value == 1.0
        assert second.ratio.value == pytest.approx(second.tau.value / first.tau.value)
        assert [own.decoded for own in first.counts[0]] == [own.decoded for own in second.counts[0]]
    num_turns = sum(len(record.get("turns", "1")) for record in RECORDS)
    assert document.tokens == {0.0: 7 * num_turns, 1.0: 7 * num_turns}
    assert ReplayDocument.model_validate_json(document.model_dump_json()) == document
    (small,) = replayed("a", options="candidates=20,levels=1").rows
    assert len(small.conditional_acceptance_rate) < len(
        document.rows[0].conditional_acceptance_rate
    )


def test_trainings_with_the_same_name_are_pooled(replayed: Replayed) -> None:
    (row,) = replayed("a", "a", "a").rows
    totals = [(sum(p.decoded for p in own), sum(p.steps for p in own)) for own in row.counts]
    assert len(row.counts) == 3
    assert row.tau.by_seed == pytest.approx([decoded / steps for decoded, steps in totals])
    decoded, steps = map(sum, zip(*totals, strict=True))
    assert row.tau.value == pytest.approx(decoded / steps)
    assert row.tau.low < row.tau.value < row.tau.high


def test_prompts_without_room_for_answers_are_refused(replayed: Replayed) -> None:
    with pytest.raises(PromptError, match="do not fit"):
        replayed("a", max_new_tokens=250)
