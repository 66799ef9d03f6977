"""Synthesized conversations have the shares of the settings, whichever candidates are dropped."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import exit_code
from helpers.templates import CHATML
from helpers.tokenizers import tiny_tokenizer
from transformers import LlamaForCausalLM

from inference import SpeculativeDecoder
from jakiro.errors import DataError
from training.data.candidates import Candidate, ConversationKind, lagging_kind
from training.data.dialogues import Dialogue
from training.data.documents import encode_documents
from training.data.regeneration.output_file import OutputFile
from training.data.sources import find_sources
from training.data.synthesis import SynthesisCounts, Synthesizer
from training.data.synthesis_settings import SynthesisSettings

TOKENIZER = tiny_tokenizer(CHATML)
SMALL = {"max_question_tokens": 24, "max_new_tokens": 12, "seed": 3}
Records = list[dict[str, Any]]


class Choosy(Synthesizer):
    """Drops two of three answers that are greedy."""

    def _answer(
        self, candidate: Candidate, turn: int, counts: SynthesisCounts
    ) -> Dialogue[dict[str, Any] | None]:
        answer = yield from super()._answer(candidate, turn, counts)
        return None if candidate.is_greedy and candidate.number % 3 else answer


class Talkative(Synthesizer):
    """Asks further questions that are always usable."""

    def _question(
        self, candidate: Candidate, turn: int, counts: SynthesisCounts
    ) -> Dialogue[str | None]:
        return f"and {turn}?" if turn else (yield from super()._question(candidate, turn, counts))


class Forbidding(Synthesizer):
    """Drops all answers that are greedy."""

    def _answer(
        self, candidate: Candidate, turn: int, counts: SynthesisCounts
    ) -> Dialogue[dict[str, Any] | None]:
        answer = yield from super()._answer(candidate, turn, counts)
        return None if candidate.is_greedy else answer


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


def _is_multi_turn(record: dict[str, Any]) -> bool:
    return len(record["messages"]) > 2


def _count(records: Records, is_greedy: bool) -> int:
    return sum(_is_greedy(record) is is_greedy for record in records)


@pytest.mark.parametrize("greedy", [0.0, 0.1, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("multi_turn", [0.0, 0.3, 1.0])
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


def test_the_share_of_greedy_answers_is_kept_although_more_of_them_are_dropped(
    target: LlamaForCausalLM, tmp_path: Path
) -> None:
    records, counts = _write(target, tmp_path / "own.jsonl", conversations=12, greedy=0.25)
    assert sum(counts.dropped.values()) > 0
    assert counts.greedy == _count(records, is_greedy=True) == 3
    for end in range(1, 13):  # also in the file of a run that was interrupted
        assert abs(_count(records[:end], is_greedy=True) - end / 4) <= 0.5


def test_as_many_greedy_as_sampled_conversations_have_several_questions(
    target: LlamaForCausalLM, tmp_path: Path
) -> None:
    changes = {"conversations": 20, "multi_turn": 0.4}
    records, counts = _write(target, tmp_path / "own.jsonl", Talkative, **changes)
    several = [record for record in records if _is_multi_turn(record)]
    assert counts.multi_turn == len(several) == 8
    assert _count(several, is_greedy=True) == 4
    assert _count(records, is_greedy=True) == 10


def test_a_share_that_cannot_be_reached_does_not_change_the_other(
    target: LlamaForCausalLM, tmp_path: Path
) -> None:
    changes = {"conversations": 8, "multi_turn": 1.0}
    records, counts = _write(target, tmp_path / "own.jsonl", Synthesizer, **changes)
    assert counts.multi_turn < 8  # few second questions end
    assert counts.greedy == _count(records, is_greedy=True) == 4


def test_shares_depend_neither_on_the_batch_size_nor_on_interruptions(
    target: LlamaForCausalLM, tmp_path: Path
) -> None:
    whole, _ = _write(target, tmp_path / "whole.jsonl", conversations=12, multi_turn=0.5)
    for size in (1, 5):
        path = tmp_path / f"{size}.jsonl"
        for conversations in (1, 4, 9, 12):
            changes = {"conversations": conversations, "batch_size": size, "multi_turn": 0.5}
            records, _ = _write(target, path, **changes)
            assert records == whole[:conversations]
        assert path.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_a_file_without_marks_is_continued_until_it_has_the_shares(
    target: LlamaForCausalLM, tmp_path: Path
) -> None:
    path = tmp_path / "own.jsonl"
    records, _ = _write(target, path, Synthesizer, conversations=8)
    kept = sorted((r for r in records if not _is_greedy(r)), key=lambda record: record["record"])
    for record in kept:
        for answer in record["messages"][1::2]:
            del answer["greedy"]
    path.write_text("".join(json.dumps(record) + "\n" for record in kept))
    continued, counts = _write(target, path, Synthesizer, conversations=8)
    assert continued[:4] == kept
    assert all(map(_is_greedy, continued[4:]))
    assert counts.greedy == counts.records == 4
    assert len({record["record"] for record in continued}) == 8


def test_marked_answers_are_data_that_training_reads(
    target: LlamaForCausalLM, tmp_path: Path
) -> None:
    marked, bare = tmp_path / "marked.jsonl", tmp_path / "bare.jsonl"
    records, _ = _write(target, marked, Synthesizer, conversations=4)
    for record in records:
        for message in record["messages"]:
            message.pop("greedy", None)
    bare.write_text("".join(json.dumps(record) + "\n" for record in records))
    documents = [
        [document.token_ids.tolist() for document in encode_documents(TOKENIZER, source.records())]
        for source in find_sources([str(marked), str(bare)])
    ]
    assert documents[0] == documents[1]
    assert len(documents[0]) == 4


def test_a_kind_without_usable_answers_is_given_up(
    target: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.data.synthesis.LONGEST_SILENCE", 20)
    with pytest.raises(DataError, match=r"20 attempts in a row .*--greedy"):
        _write(target, tmp_path / "own.jsonl", Forbidding, conversations=4)
    records, _ = _write(target, tmp_path / "own.jsonl", Forbidding, conversations=4, greedy=0.0)
    assert _count(records, is_greedy=False) == 4


def test_the_shares_are_printed_at_the_end(
    target: LlamaForCausalLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target.save_pretrained(tmp_path / "target")
    TOKENIZER.save_pretrained(tmp_path / "target")
    words = ["--target", str(tmp_path / "target"), "--out", str(tmp_path / "own.jsonl")]
    words += ["--max-question-tokens", "24", "--max-new-tokens", "12", "--max-turns", "1"]
    assert exit_code("synthesize", *words, "--conversations", "8", "--greedy", "0.25") == 0
    printed = capsys.readouterr().out
    assert "shares: 25.0% with greedy answers, 0.0% with several questions" in printed
