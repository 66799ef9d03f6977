"""The decode loop on tiny models: greedy tokens, seeds, exact stops, and refused requests."""

import pytest
import torch
from helpers.models import tiny_drafter, tiny_llama
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM

from inference import SpeculativeDecoder
from inference.trees.shape import TreeShape
from jakiro.errors import PromptError
from jakiro.target.adapter import TargetAdapter

SHAPES = {
    "deterministic": TreeShape(children=4, breadth=3, num_nodes=12),
    "deep": TreeShape(autoregressive_levels=5, parallel_levels=1, children=2, num_nodes=9),
    "one parallel pass": TreeShape(autoregressive_levels=1, children=3, num_nodes=6),
    "sampled": TreeShape(children=3, breadth=2, sampled=True),
}


def _decoder(model: LlamaForCausalLM, shape: TreeShape) -> SpeculativeDecoder:
    drafter = tiny_drafter(TargetAdapter(model))
    return SpeculativeDecoder(model, drafter, tree=shape)


def _by_transformers(model: LlamaForCausalLM, prompt: list[int], **config: object) -> list[int]:
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **config)
    return out[0].tolist()


UNTIED = [pytest.param(name, False, marks=pytest.mark.slow) for name in SHAPES]


@pytest.mark.parametrize(("name", "tied"), [*((name, True) for name in SHAPES), *UNTIED])
def test_greedy_tokens_equal_those_of_transformers(name: str, tied: bool) -> None:
    # With tied weights and a small vocabulary, the text repeats itself, so drafts are accepted.
    model = tiny_llama(vocab=11, tie_word_embeddings=tied)
    decoder = _decoder(model, SHAPES[name])
    accepted = 0
    for seed in range(3):
        torch.manual_seed(seed)
        prompt = torch.randint(0, 11, (5 + seed,)).tolist()
        output = decoder.generate(prompt, max_new_tokens=30)
        assert output.sequences[0].tolist() == _by_transformers(model, prompt, max_new_tokens=30)
        accepted += output.stats.accepted.total()
        assert output.stats.tau == pytest.approx(29 / output.stats.target_forwards)
    assert accepted > 0


def test_greedy_tokens_stay_equal_beyond_a_sliding_window() -> None:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=13,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        sliding_window=8,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = MistralForCausalLM(config).eval()
    decoder = _decoder(model, SHAPES["deep"])
    output = decoder.generate([1, 2, 3], max_new_tokens=50)
    assert output.sequences[0].tolist() == _by_transformers(model, [1, 2, 3], max_new_tokens=50)


def test_decoding_never_goes_past_end_of_sequence_or_the_length_limit() -> None:
    model = tiny_llama(vocab=11)
    decoder = _decoder(model, SHAPES["deterministic"])
    full = decoder.generate([1, 2], max_new_tokens=25).new_token_ids
    for limit in range(1, 12):
        assert decoder.generate([1, 2], max_new_tokens=limit).new_token_ids == full[:limit]
    for eos in dict.fromkeys(full):
        output = decoder.generate([1, 2], max_new_tokens=25, eos_token_id=eos)
        assert output.new_token_ids == full[: full.index(eos) + 1]


def test_decoding_up_to_the_last_position_of_the_context_works() -> None:
    model = tiny_llama(vocab=11, max_position_embeddings=24)
    decoder = _decoder(model, SHAPES["deep"])
    output = decoder.generate([1, 2, 3, 4], max_new_tokens=20)
    assert output.sequences[0].tolist() == _by_transformers(model, [1, 2, 3, 4], max_new_tokens=20)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"num_beams": 4}, "beam_search"),
        ({"temperature": -1.0}, "temperature"),
        ({"num_return_sequences": 3}, "num_return_sequences|arguments"),
        ({"prompt_lookup_num_tokens": 3}, "assisted_generation"),
        ({"guidance_scale": 2.0}, "Guidance"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive_search"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ({"temperature": 1.0, "top_k": -1}, "top_k"),
        ({"assistant_model": "another"}, "assistant_model"),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused_by_name(arguments: dict[str, float], name: str) -> None:
    decoder = _decoder(tiny_llama(), SHAPES["deterministic"])
    with pytest.raises(PromptError, match=name):
        decoder.generate([1, 2], max_new_tokens=4, **arguments)
