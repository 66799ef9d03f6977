"""Methods count tokens, forward passes and deliveries, and forget texts between groups."""

import pytest
from helpers.models import tiny_llama

from inference.benchmark.methods import JakiroDecoding, SamplingOptions
from inference.benchmark.transformers_methods import TransformersDecoding
from inference.decoder import SpeculativeDecoder
from inference.drafters.aded.drafter import AdedDrafter


def test_a_sequence_that_ends_early_in_a_batch_is_counted_without_its_padding() -> None:
    model = tiny_llama(vocab=61)
    method = TransformersDecoding("transformers", "transformers", model)
    sampling = SamplingOptions(0.0, 12)
    prompts = [[5, 6, 7], [9, 3, 2, 8, 1]]
    alone = [method.decode([prompt], sampling, 0).continuations[0].token_ids for prompt in prompts]
    end = next(token for token in alone[0] if token not in alone[1])
    unused = next(token for token in range(61) if token not in {*alone[0], *alone[1]})
    model.generation_config.eos_token_id = [unused, end]
    both = method.decode(prompts, sampling, 0).continuations
    length = alone[0].index(end) + 1
    assert [one.token_ids for one in both] == [alone[0][:length], alone[1]]
    assert [one.stats.target_forwards for one in both] == [length - 1, 11]


def test_tokens_that_prefill_delivers_are_not_decoded_tokens() -> None:
    model = tiny_llama(vocab=61)
    how = {"assistant_model": tiny_llama(vocab=61)}  # the same model, so that drafts are accepted
    method = TransformersDecoding("assisted", "transformers-lookup", model, **how)
    (one,) = method.decode([[5, 6, 7]], SamplingOptions(0.0, 24), 0).continuations
    assert one.stats.from_prefill > 1
    assert one.stats.decoded == 24 - one.stats.from_prefill
    assert 0 < one.stats.target_forwards < one.stats.decoded


def test_resetting_our_decoding_keeps_what_is_known_about_trees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter = AdedDrafter()
    decoder = SpeculativeDecoder(tiny_llama(vocab=61), drafter)
    resets: list[str] = []
    monkeypatch.setattr(decoder.policy, "reset", lambda: resets.append("trees"))
    monkeypatch.setattr(drafter, "reset", lambda: resets.append("texts"))
    JakiroDecoding("aded", "aded", decoder).reset()
    assert resets == ["texts"]
