"""Synthesized conversations have the shares of the settings, whichever candidates are dropped."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from helpers.templates import CHATML
from helpers.tokenizers import tiny_tokenizer
from transformers import LlamaForCausalLM

from inference import SpeculativeDecoder
from jakiro.errors import DataError
from training.data.candidates import Candidate, ConversationKind, lagging_kind
from training.data.dialogues import Dialogue
from training.data.generation_settings import SynthesisSettings
from training.data.output_file import OutputFile
from training.data.synthesis import SynthesisCounts, Synthesizer

TOKENIZER = tiny_tokenizer(CHATML)
SMALL = {"max_question_tokens": 24, "max_new_tokens": 12, "seed": 3}
Records = list[dict[str, Any]]


class Choosy(Synthesizer):
    """Drops two of three answers that are greedy."""

    def _answer(self, candidate: Candidate, turn: int) -> Dialogue[dict[str, Any] | None]:
        answer = yield from super()._answer(candidate, turn)
        return None if candidate.wanted.is_greedy and candidate.number % 3 else answer


class Forbidding(Synthesizer):
    """Drops all answers that are greedy."""

    def _answer(self, candidate: Candidate, turn: int) -> Dialogue[dict[str, Any] | None]:
        answer = yield from super()._answer(candidate, turn)
        return None if candidate.wanted.is_greedy else answer


def _write(
    target: LlamaForCausalLM, path: Path, kind: type[Synthesizer] = Choosy, **changes: Any
) -> tuple[Records, SynthesisCounts]:
    settings = SynthesisSettings(**{**SMALL, **changes})
    decoder = SpeculativeDecoder(target, tokenizer=TOKENIZER)
    counts = kind(decoder, settings).write(OutputFile(path))
    return _read(path), counts


def _read(path: Path) -> Records:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _is_greedy(record: dict[str, Any]) -> bool:
    (mark,) = {message["greedy"] for message in record["messages"][1::2]}
    return bool(mark)


def _count(records: Records, is_greedy: bool) -> int:
    return sum(_is_greedy(record) is is_greedy for record in records)


@pytest.mark.parametrize(
    ("greedy", "multi_turn"), [(0.0, 0.3), (0.1, 1.0), (0.3, 0.3), (0.5, 0.0), (1.0, 0.3)]
)
def test_the_next_kind_brings_every_share_closest_to_its_setting(
    greedy: float, multi_turn: float
) -> None:
    settings = SynthesisSettings(conversations=1, greedy=greedy, multi_turn=multi_turn)
    numbers: Counter[ConversationKind] = Counter()
    for total in range(1, 101):
        numbers[lagging_kind(settings, numbers)] += 1
        num_greedy = numbers[ConversationKind(True, False)] + numbers[ConversationKind(True, True)]
        assert abs(num_greedy - greedy * total) <= 0.5 + 1e-9
        for is_greedy, size in ((True, num_greedy), (False, total - num_greedy)):
            assert abs(numbers[ConversationKind(is_greedy, True)] - multi_turn * size) <= 0.5 + 1e-9


@pytest.mark.slow
def test_the_share_of_greedy_answers_is_kept_although_more_of_them_are_dropped(
    target: LlamaForCausalLM, tmp_path: Path
) -> None:
    records, counts = _write(target, tmp_path / "own.jsonl", conversations=12, greedy=0.25)
    assert sum(counts.dropped.values()) > 0
    assert counts.greedy == _count(records, is_greedy=True) == 3
    for end in range(1, 13):  # also in the file of a run that was interrupted
        assert abs(_count(records[:end], is_greedy=True) - end / 4) <= 0.5


@pytest.mark.slow
def test_shares_depend_neither_on_the_batch_size_nor_on_interruptions(
    target: LlamaForCausalLM, tmp_path: Path
) -> None:
    whole, _ = _write(target, tmp_path / "whole.jsonl", conversations=12, multi_turn=0.5)
    path = tmp_path / "parts.jsonl"
    for conversations, size in ((1, 1), (9, 5), (12, 3)):
        changes = {"conversations": conversations, "batch_size": size, "multi_turn": 0.5}
        records, _ = _write(target, path, **changes)
        assert records == whole[:conversations]
    assert path.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_a_kind_without_usable_answers_is_given_up(
    target: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.data.synthesis.LONGEST_SILENCE", 20)
    with pytest.raises(DataError, match=r"20 attempts in a row .*--greedy"):
        _write(target, tmp_path / "own.jsonl", Forbidding, conversations=4)
    records, _ = _write(target, tmp_path / "own.jsonl", Forbidding, conversations=4, greedy=0.0)
    assert _count(records, is_greedy=False) == 4
