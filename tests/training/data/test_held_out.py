"""What is held out stays the same whatever else the data holds, and never trains."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.models import tiny_llama
from helpers.templates import family_tokenizer
from helpers.training import tiny_run, write_jsonl

from inference.generation.prompt_file import read_bench_prompts
from jakiro.errors import DataError, PromptError
from training.data.held_out import choose_held_out, prompts_of, read_prompts
from training.data.token_store import Places, TokenStore
from training.setup.preparation import prepare

LENGTHS = (9, 30, 12, 50, 8, 21)


def store(order: list[int], first_response: int = 0) -> TokenStore:
    """Documents, each filled with its own number."""
    starts = np.cumsum([0, *(LENGTHS[number] for number in order)])
    token_ids = np.concatenate([np.full(LENGTHS[n], n, np.int32) for n in order])
    positions = np.concatenate([np.arange(LENGTHS[n]) for n in order])
    return TokenStore(token_ids, positions >= first_response, starts, "any")


@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_every_document_either_trains_or_is_held_out(count: int) -> None:
    training, held_out = choose_held_out(store([0, 1, 2, 3, 4, 5]), count)
    assert len(held_out) == count
    assert sorted([*training, *held_out]) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("share", [0.4, 1.0])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_documents_of_one_conversation_are_held_out_together_or_not_at_all(
    count: int, share: float
) -> None:
    rows = [1, 2, 2, 2, 4, 4]
    places = Places(("chats.jsonl",), np.array([(0, row) for row in rows]))
    split = replace(store([0, 1, 2, 3, 4, 5]), places=places)
    training, held_out = (
        {rows[one] for one in some} for some in choose_held_out(split, count, share)
    )
    assert len(held_out) == count
    assert len(training) == max(1, round(share * (3 - count)))
    assert training.isdisjoint(held_out)
    chosen = np.concatenate(choose_held_out(split, count, share))
    assert sorted(chosen) == [n for n, row in enumerate(rows) if row in training | held_out]
    with pytest.raises(DataError, match="fewer than all 3 rows of data; got: 3"):
        choose_held_out(split, 3)


def test_no_answer_of_a_held_out_conversation_is_trained_on_where_each_is_a_document(
    workshop: Path,
) -> None:
    tokenizer = family_tokenizer("qwen3")
    tokenizer.save_pretrained(workshop / "target")
    turns = [{"role": role, "content": "?"} for role in ("user", "assistant") * 2]
    rows = [
        {"messages": [{**turn, "content": f"{n} {text}"} for turn in turns]}
        for n, text in enumerate("abcd")
    ]
    write_jsonl(workshop / "texts.jsonl", rows)
    vocab = len(tokenizer)
    inputs = prepare(tiny_run(workshop), tiny_llama(vocab=vocab, max_position_embeddings=256))
    store = inputs.rows.store
    assert store.num_documents == 8
    training, held_out = choose_held_out(store, 2)
    assert {store.describe([one]) for one in training.tolist()}.isdisjoint(
        {store.describe([one]) for one in held_out.tolist()}
    )


def test_the_order_of_the_data_does_not_decide() -> None:
    chosen = []
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 4, 2]):
        chosen.append({order[index] for index in choose_held_out(store(order), 3)[1]})
    assert chosen[0] == chosen[1]


def test_hashes_that_were_kept_decide_as_computed_ones_do() -> None:
    computed = store([0, 1, 2, 3, 4, 5])
    kept = replace(computed, known_hashes=computed.hashes)
    for one, other in zip(choose_held_out(computed, 2), choose_held_out(kept, 2), strict=True):
        np.testing.assert_array_equal(one, other)
    assert len(set(computed.hashes.tolist())) == len(LENGTHS)


def test_holding_everything_out_is_refused() -> None:
    with pytest.raises(DataError, match="leaves nothing to train on"):
        choose_held_out(store([0, 1]), 2)


def test_a_conversation_is_cut_before_its_first_answer() -> None:
    prompts = prompts_of(store([0, 1], 5), np.array([1, 0]), prompt_tokens=3, longest=99, count=9)
    assert prompts == [[1] * 5, [0] * 5]


def test_a_text_is_cut_early_enough_to_leave_half_of_it() -> None:
    prompts = prompts_of(store([0, 1]), [0, 1], prompt_tokens=10, longest=99, count=9)
    assert prompts == [[0] * 4, [1] * 10]


def test_prompts_that_do_not_fit_the_context_are_passed_over() -> None:
    prompts = prompts_of(store([0, 1, 2]), [0, 1, 2], prompt_tokens=10, longest=6, count=1)
    assert prompts == [[0] * 4]
    assert prompts_of(store([1]), [0], prompt_tokens=10, longest=6, count=1) == []


def test_prompts_are_read_as_the_bench_reads_them(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "?"}]
    rows = [{"prompt": "def"}, {"prompt": [3, 4]}, {"turns": ["?", "and?"]}, {"messages": chat}]
    path = write_jsonl(tmp_path / "prompts.jsonl", [*rows, {"x": 1}])
    assert read_prompts(path, 4) == ["def", [3, 4], chat, chat]
    assert read_prompts(path, 4) == [one.first for one in read_bench_prompts(_first(path, 4))]
    with pytest.raises(PromptError, match=r"prompts\.jsonl:5 has no usable prompt"):
        read_prompts(path, 5)
    (tmp_path / "prompts.txt").write_text("one\n\ntwo\n")
    assert read_prompts(tmp_path / "prompts.txt", 9) == ["one", "two"]


def test_rows_of_training_data_are_prompts_without_their_last_answers(tmp_path: Path) -> None:
    turns = [{"role": role, "content": "?"} for role in ("user", "assistant") * 2]
    rows = [{"text": "def"}, {"messages": turns}, {"prompt": [*turns, turns[-1]]}]
    path = write_jsonl(tmp_path / "rows.jsonl", [*rows, {"messages": turns[1:2]}])
    assert read_prompts(path, 3) == ["def", turns[:3], turns[:3]]
    with pytest.raises(PromptError, match=r"rows\.jsonl:4 has no usable prompt"):
        read_prompts(path, 4)


def _first(path: Path, count: int) -> Path:
    shorter = path.with_name("first.jsonl")
    shorter.write_text("".join(path.read_text().splitlines(keepends=True)[:count]))
    return shorter
