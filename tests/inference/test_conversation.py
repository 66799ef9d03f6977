"""Each turn of a conversation gives the tokens of a fresh start, and reads only new tokens."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from helpers.models import tiny_drafter, tiny_llama

from inference import SpeculativeDecoder
from inference.conversation import Conversation
from inference.drafters.aded.drafter import AdedDrafter, TrigramProposer
from inference.engine.policy import AlwaysDraft
from inference.trees.shape import TreeShape
from jakiro.errors import PromptError
from jakiro.target.adapter import TargetAdapter
from jakiro.target.step import StepInput, StepOutput


@pytest.fixture
def decoder() -> SpeculativeDecoder:
    model = tiny_llama(vocab=11)
    tree = TreeShape(children=4, breadth=3, num_nodes=12)
    return SpeculativeDecoder(model, tiny_drafter(TargetAdapter(model)), tree=tree)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """An iterator with one item, the list of the numbers of queries of the target's forwards."""
    counts: list[int] = []
    original = TargetAdapter.forward

    def counted(self: TargetAdapter, step: StepInput, cache: object) -> StepOutput:
        counts.append(step.token_ids.shape[1])
        return original(self, step, cache)  # type: ignore[arg-type]

    monkeypatch.setattr(TargetAdapter, "forward", counted)
    return iter([counts])  # type: ignore[return-value, list-item]


def test_a_turn_reads_only_what_is_new(
    decoder: SpeculativeDecoder, read: Iterator[list[int]]
) -> None:
    counts = next(read)
    with Conversation() as conversation:
        first = decoder.generate([1] * 40, max_new_tokens=9, conversation=conversation)
        assert counts[0] == 40
        assert conversation.num_cached == 40 + 8  # all but the last token
        counts.clear()
        longer = [1] * 40 + [*first.new_token_ids, 7, 8]
        decoder.generate(longer, max_new_tokens=5, conversation=conversation)
        assert counts[0] == 3


def test_a_changed_history_is_read_again_from_the_change_on(decoder: SpeculativeDecoder) -> None:
    with Conversation() as conversation:
        decoder.generate([1, 2, 3, 4, 5], max_new_tokens=6, conversation=conversation)
        for prompt in ([1, 2, 9, 9], [1, 2], [7], [1, 2, 3, 4, 5]):
            got = decoder.generate(prompt, max_new_tokens=9, conversation=conversation)
            assert got.new_token_ids == decoder.generate(prompt, max_new_tokens=9).new_token_ids


def test_a_turn_that_was_stopped_leaves_its_tokens_cached(decoder: SpeculativeDecoder) -> None:
    with Conversation() as conversation:
        steps = decoder.steps([1, 2, 3], max_new_tokens=30, conversation=conversation)
        written = [token for _ in range(3) for token in next(steps).token_ids]
        steps.close()
        assert conversation.num_cached == 3 + len(written) - 1
        prompt = [1, 2, 3, *written, 5, 6]
        got = decoder.generate(prompt, max_new_tokens=9, conversation=conversation)
        assert got.new_token_ids == decoder.generate(prompt, max_new_tokens=9).new_token_ids


def test_turns_may_sample_differently_and_need_more_slots_than_the_first(
    decoder: SpeculativeDecoder,
) -> None:
    with Conversation() as conversation:
        decoder.generate([1, 2], max_new_tokens=3, conversation=conversation)
        arguments = {"max_new_tokens": 40, "temperature": 0.7, "seed": 4}
        got = decoder.generate([1, 2, 5], conversation=conversation, **arguments)
        assert got.new_token_ids == decoder.generate([1, 2, 5], **arguments).new_token_ids


def test_a_turn_that_failed_leaves_a_usable_conversation(
    decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Conversation() as conversation:
        with monkeypatch.context() as patch:
            patch.setattr(TargetAdapter, "logits", _broken_after(2))
            with pytest.raises(RuntimeError, match="broken"):
                decoder.generate([1, 2, 3], max_new_tokens=16, conversation=conversation)
        got = decoder.generate([1, 2, 3], max_new_tokens=16, conversation=conversation)
        assert got.new_token_ids == decoder.generate([1, 2, 3], max_new_tokens=16).new_token_ids


def _broken_after(calls: int) -> object:
    original = TargetAdapter.logits
    left = [calls * 4]

    def logits(self: TargetAdapter, features: torch.Tensor) -> torch.Tensor:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("broken")
        return original(self, features)

    return logits


def test_a_conversation_belongs_to_one_decoder(decoder: SpeculativeDecoder) -> None:
    other = SpeculativeDecoder(tiny_llama(vocab=11, seed=7))
    with Conversation() as conversation:
        decoder.generate([1, 2, 3], max_new_tokens=5, conversation=conversation)
        with pytest.raises(PromptError, match="another decoder"):
            other.generate([1, 2, 3, 4], max_new_tokens=5, conversation=conversation)


def test_a_second_turn_at_the_same_time_is_refused(decoder: SpeculativeDecoder) -> None:
    prompt, expected = [1, 2, 3], decoder.generate([1, 2, 3], max_new_tokens=9)
    conversation = Conversation()
    steps = decoder.steps(prompt, max_new_tokens=9, conversation=conversation)
    tokens = list(next(steps).token_ids)
    with ThreadPoolExecutor(1) as threads:
        options = {"max_new_tokens": 9, "conversation": conversation}
        other = threads.submit(decoder.generate, prompt, **options)
        with pytest.raises(PromptError, match=r"last turn.*not ended yet.*a Conversation for each"):
            other.result()
    tokens += [token for step in steps for token in step.token_ids]
    assert tokens == expected.new_token_ids
    again = decoder.generate(prompt, max_new_tokens=9, conversation=conversation)
    assert again.new_token_ids == expected.new_token_ids


def test_closing_during_a_turn_frees_the_caches_after_the_turn(decoder: SpeculativeDecoder) -> None:
    expected, conversation = decoder.generate([1, 2, 3], max_new_tokens=9), Conversation()
    steps = decoder.steps([1, 2, 3], max_new_tokens=9, conversation=conversation)
    tokens = list(next(steps).token_ids)
    conversation.close()
    tokens += [token for step in steps for token in step.token_ids]
    assert tokens == expected.new_token_ids
    assert conversation.num_cached == 0
    assert conversation._context is None


def test_after_a_long_pause_no_token_is_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[tuple[int, int]] = []
    original = TrigramProposer.read

    def read(self: TrigramProposer, token_ids: np.ndarray, num_known: int) -> None:
        reads.append((num_known, len(token_ids)))
        original(self, token_ids, num_known)

    monkeypatch.setattr(TrigramProposer, "read", read)
    model, drafter = tiny_llama(vocab=23, max_position_embeddings=1024), AdedDrafter()
    decoder = SpeculativeDecoder(model, drafter, tree="fixed")
    with Conversation() as conversation:
        decoder.policy = AlwaysDraft(None)  # no drafts for more than one chunk
        first = decoder.generate([1, 2, 3], max_new_tokens=520, conversation=conversation)
        decoder.policy = AlwaysDraft.with_all_of(drafter)
        longer = [*first.sequences[0].tolist(), 4, 5]
        output = decoder.generate(longer, max_new_tokens=20, conversation=conversation)
    expected = SpeculativeDecoder(model).generate(longer, max_new_tokens=20)
    assert output.new_token_ids == expected.new_token_ids
    # The last token of a turn is not cached, so the next turn reads it again.
    (_, end), *later = reads
    assert later[0][0] == end - 1
    assert [start for start, _ in later[1:]] == [end for _, end in later[:-1]]
