"""The number of threads that steps are timed with changes neither texts nor the process."""

import pytest
import torch
from helpers.models import tiny_llama

from inference import SpeculativeDecoder
from inference.autotune import threads
from inference.autotune.costs import NODE_COUNTS, costs_with
from inference.autotune.threads import choose_threads, contending_threads
from inference.drafters.lookup import LookupDrafter
from jakiro.target.adapter import TargetAdapter


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> TargetAdapter:
    """A target whose steps take a second with one thread, 0.7 with two, and two with four."""
    monkeypatch.setattr(threads.torch, "get_num_threads", lambda: 4)
    seconds = {1: 1.0, 2: 0.7, 4: 2.0}
    monkeypatch.setattr(
        threads, "shortest_seconds", lambda works, _: {key: seconds[key[0]] for key in works}
    )
    return TargetAdapter(tiny_llama())


def test_the_fastest_number_of_threads_is_chosen(target: TargetAdapter) -> None:
    assert choose_threads(target, "auto", drafts=True) == 2
    assert choose_threads(target, 3, drafts=True) == 3
    assert choose_threads(target, None, drafts=False) is None


def test_only_clearly_slower_numbers_cannot_be_the_fastest_elsewhere(target: TargetAdapter) -> None:
    assert contending_threads(target, "auto") == [1, 2]


def test_a_target_with_few_positions_is_timed_with_small_trees() -> None:
    model = tiny_llama(vocab=23, max_position_embeddings=32)
    assert 1 < len(costs_with(TargetAdapter(model), None).verify) < len(NODE_COUNTS)
    decoder = SpeculativeDecoder(model, LookupDrafter(), threads="auto")
    assert len(decoder.generate([1, 2, 1, 2], max_new_tokens=9).new_token_ids) == 9


def test_the_choice_changes_neither_the_text_nor_the_threads_of_the_process() -> None:
    model, before = tiny_llama(vocab=23), torch.get_num_threads()
    prompt = [1, 2, 3, 1, 2, 3, 1, 2]
    expected = SpeculativeDecoder(model).generate(prompt, max_new_tokens=30).new_token_ids
    for number in ("auto", 2):
        decoder = SpeculativeDecoder(model, LookupDrafter(), threads=number, tree="fixed")
        assert decoder.generate(prompt, max_new_tokens=30).new_token_ids == expected
        assert torch.get_num_threads() == before
