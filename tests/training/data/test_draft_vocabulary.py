"""The draft vocabulary: the selection of its tokens, losses over these tokens, and runs."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.models import tiny_settings
from helpers.training import TEXTS, one_document, tiny_run, tiny_training
from hypothesis import given
from hypothesis import strategies as st

from inference import SpeculativeDecoder
from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError
from training.config import TrainSettings
from training.data.draft_vocabulary import automatic_size, choose_draft_ids
from training.data.token_store import TokenStore
from training.loss.drafting import draft_all_positions
from training.setup.preparation import prepare
from training.train import train


def store_of(*documents: list[int], prompt: int = 0) -> TokenStore:
    """Return documents whose first `prompt` tokens are not part of a response."""
    starts = np.cumsum([0, *map(len, documents)])
    is_response = np.concatenate([np.arange(len(tokens)) >= prompt for tokens in documents])
    return TokenStore(np.concatenate(documents).astype(np.int32), is_response, starts, "any")


def test_the_most_frequent_response_tokens_are_drafted() -> None:
    store = store_of([9, 9, 9, 5, 5, 2], [8, 8, 8, 5, 7, 2], prompt=3)
    assert choose_draft_ids(store, np.arange(2), 2, 10).tolist() == [2, 5]
    assert choose_draft_ids(store, [0, 1], 3, 10).tolist() == [2, 5, 7]
    assert choose_draft_ids(store, [0], 2, 10).tolist() == [2, 5]  # document 1 is not read


def test_a_vocabulary_of_a_handful_of_tokens_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = store_of([1, 2, 3, 4, 5] * 20)
    assert choose_draft_ids(store, [0], "auto", 60_000).tolist() == [1, 2, 3, 4, 5]
    assert "only 5 different tokens" in caplog.text


@given(st.lists(st.integers(0, 20), min_size=1, max_size=60), st.data())
def test_ties_go_to_smaller_ids_whatever_the_order(tokens: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(set(tokens))))
    by_count = sorted(set(tokens), key=lambda token: (-tokens.count(token), token))
    shuffled = data.draw(st.permutations(tokens))
    got = choose_draft_ids(store_of(list(shuffled)), [0], size, 21)
    assert got.tolist() == sorted(by_count[:size])
    assert got.dtype == torch.int64


def test_a_size_is_cut_to_the_tokens_that_the_responses_hold(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = store_of([1, 2, 3, 3, 4, 4], prompt=2)
    with caplog.at_level("INFO"):
        assert choose_draft_ids(store, [0], 3, 10).tolist() == [3, 4]
    assert "draft vocabulary: 2 tokens, which cover 100.0% of the response tokens" in caplog.text


@pytest.mark.parametrize(
    ("num_frequent", "num_others", "vocab_size", "expected"),
    [
        (8_192, 0, 50_000, 8_192),
        (8_193, 0, 50_000, 8_192),  # 8,192 of 8,193 equally frequent tokens: more than 97%
        (9_000, 0, 50_000, 16_384),
        (50_000, 0, 50_000, 32_768),  # no size covers 97%
        (30_000, 0, 32_768, None),
        (30_000, 0, 32_769, 32_768),
        (16_383, 0, 16_384, None),
    ],
)
def test_the_automatic_size_is_the_smallest_that_covers_97_percent(
    num_frequent: int, num_others: int, vocab_size: int, expected: int | None
) -> None:
    counts = np.zeros(vocab_size, np.int64)
    counts[:num_frequent] = 100
    counts[vocab_size - num_others :] = 1
    shuffled = np.random.default_rng(0).permutation(counts)
    assert automatic_size(shuffled) == expected


def test_automatic_ids_are_those_of_the_responses(caplog: pytest.LogCaptureFixture) -> None:
    frequent = list(range(100, 20_100, 2))  # 10,000 tokens; the first occurs once, others twice
    documents = [frequent[:1] + [7] * 9, frequent[1:] * 2]
    with caplog.at_level("INFO"):
        ids = choose_draft_ids(store_of(*documents, prompt=0), [0, 1], "auto", 40_000)
    assert ids is not None
    assert ids.tolist() == [7, *frequent]  # the automatic size 16,384 is cut to these
    assert "draft vocabulary (auto): 10,001 tokens, which cover 100.0%" in caplog.text


@pytest.mark.parametrize(("size", "vocab_size"), [("auto", 8_192), (None, 50_000)])
def test_all_tokens_may_be_drafted_for_small_vocabularies_or_if_wanted(
    size: Any, vocab_size: int
) -> None:
    assert choose_draft_ids(store_of([1, 2, 3]), [0], size, vocab_size) is None


@pytest.mark.parametrize("combine", ["sum", "mixture"])
@torch.no_grad()
def test_token_losses_sum_over_drafted_tokens_alone(combine: str) -> None:
    tiny = tiny_training(tiny_settings(combine=combine, parallel_levels=2, draft_vocab_size=9))
    drafter, count = tiny.drafter, 14
    ids = torch.tensor([0, 3, 7, 12, 20, 33, 41, 55, 60])
    assert drafter.draft_ids is not None
    drafter.draft_ids.copy_(ids)
    tokens = ids[torch.randint(0, 9, (1, count))]
    tokens[0, [4, 9]] = torch.tensor([1, 59])  # never drafted: no change of the posterior
    batch = one_document(tokens, (torch.arange(count) - 1).clamp(min=0))
    view = tiny.view(batch)
    (output,) = draft_all_positions(drafter, view, batch)
    terms = tiny.loss(batch, distance_decay=1.0)

    drafted = tiny.target.logits(output.features[0])[..., ids].softmax(-1)
    target_probs = tiny.target.logits(view.features[0]).softmax(-1)
    expected, correct = torch.zeros(3), torch.zeros(3)
    for i in range(1, count):
        weights = output.log_weights[0, i].exp()
        for level in range(min(3, count - 1 - i)):
            draft_probs = weights @ drafted[i, level]
            expected[level] -= (target_probs[i + level][ids] * draft_probs.log()).sum()
            correct[level] += int(ids[draft_probs.argmax()] == target_probs[i + level].argmax())
            token = int(tokens[0, i + level + 1])
            if token in ids:
                weights = weights * drafted[i, level, :, ids.tolist().index(token)]
                weights = weights / weights.sum()
    torch.testing.assert_close(terms.token, expected, atol=1e-3, rtol=1e-4)
    assert torch.equal(terms.correct, correct)


def _run(folder: Path, size: int | str) -> TrainSettings:
    return tiny_run(folder, drafter={"draft_vocab_size": size})


def test_a_run_with_a_vocabulary_of_its_own_decodes_losslessly(workshop: Path) -> None:
    folder = train(_run(workshop, 24))
    drafter = JakiroDrafter.from_pretrained(folder)
    ids = drafter.draft_ids
    assert ids is not None
    assert len(ids) == 24
    assert ids.tolist() != list(range(24))
    decoder = SpeculativeDecoder.from_pretrained(folder, tree="fixed")
    for text in TEXTS[:3]:
        prompt = decoder.tokenizer(text[:20], return_tensors="pt")
        expected = decoder.target.model.generate(**prompt, do_sample=False, max_new_tokens=24)
        got = decoder.generate(text[:20], max_new_tokens=24)
        assert got.sequences.tolist() == expected.tolist()


def test_an_automatic_size_is_kept_as_a_number_also_by_a_resumed_run(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.data.draft_vocabulary.AUTO_DRAFT_VOCAB_SIZES", (16, 24, 32))
    settings = _run(workshop, "auto")
    inputs = prepare(settings)
    assert inputs.draft_ids is not None
    folder = train(settings)
    drafter = JakiroDrafter.from_pretrained(folder)
    assert drafter.draft_ids is not None
    assert drafter.draft_ids.tolist() == inputs.draft_ids.tolist()
    assert drafter.config.drafter is not None
    assert drafter.config.drafter["draft_vocab_size"] == len(inputs.draft_ids) in (24, 32)
    shutil.rmtree(folder)  # the run resumes from its last checkpoint
    assert train(settings) == folder
    again = JakiroDrafter.from_pretrained(folder)
    assert torch.equal(drafter.draft_ids, again.draft_ids)


def test_a_vocabulary_larger_than_the_targets_is_refused_before_the_run_folder_is_touched(
    workshop: Path,
) -> None:
    with pytest.raises(ConfigError, match="larger than the target's vocabulary"):
        train(_run(workshop, 301))
    assert not (workshop / "run").exists()
