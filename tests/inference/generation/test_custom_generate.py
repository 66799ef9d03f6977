"""`target.generate(custom_generate=decoder)` gives the tokens of `target.generate()`."""

import pytest
import torch
from helpers.models import tiny_drafter, tiny_llama
from helpers.tokenizers import tiny_tokenizer
from torch import Tensor
from transformers import (
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TextStreamer,
    TopKLogitsWarper,
)

from inference import SpeculativeDecoder
from inference.drafters.lookup import LookupDrafter
from inference.trees.shape import TreeShape
from jakiro.errors import PromptError, TargetMismatch
from jakiro.target.adapter import TargetAdapter

PADDED = torch.tensor([[0, 0, 0, 1, 2, 3], [0, 5, 6, 7, 8, 9], [4, 5, 6, 7, 8, 9]])
MASK = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1], [1] * 6])
GREEDY = {"do_sample": False, "pad_token_id": 0}
CONFIGS = [
    {"max_new_tokens": 12},
    {"max_length": 16, "repetition_penalty": 1.3},
    {"max_new_tokens": 12, "no_repeat_ngram_size": 2},
    {"max_new_tokens": 12, "min_new_tokens": 5, "eos_token_id": [3, 4]},
    {"max_new_tokens": 12, "eos_token_id": 5, "exponential_decay_length_penalty": (4, 1.4)},
    {"max_new_tokens": 12, "forced_eos_token_id": 7, "suppress_tokens": [2, 8]},
    {"max_new_tokens": 12, "begin_suppress_tokens": [1, 2, 3], "bad_words_ids": [[4, 5], [6]]},
    {"max_new_tokens": 12, "sequence_bias": [[[9], 3.0], [[1, 2], -4.0]]},
]
PADDED_CONFIGS = [CONFIGS[2], CONFIGS[3], CONFIGS[6]]


class Shy(LogitsProcessor):
    """A processor that makes a repetition of the last token less likely."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.scatter_add(1, input_ids[:, -1:], torch.full_like(scores[:, :1], -2.0))


@pytest.fixture
def model() -> LlamaForCausalLM:
    return tiny_llama(vocab=11)


@pytest.fixture
def decoder(model: LlamaForCausalLM) -> SpeculativeDecoder:
    tree = TreeShape(children=4, breadth=3, num_nodes=12)
    return SpeculativeDecoder(model, tiny_drafter(TargetAdapter(model)), tree=tree)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_both_ways_to_call_equal_the_targets_own_greedy_tokens(
    model: LlamaForCausalLM, decoder: SpeculativeDecoder, config: dict[str, object]
) -> None:
    ids = torch.tensor([[1, 2, 3, 4]])
    arguments = {"attention_mask": torch.ones_like(ids), **GREEDY, **config}
    expected = model.generate(ids, **arguments).tolist()
    assert model.generate(ids, custom_generate=decoder, **arguments).tolist() == expected
    assert decoder.generate(ids, **{**GREEDY, **config}).sequences.tolist() == expected


def test_left_padded_sequences_equal_the_targets_own(
    model: LlamaForCausalLM, decoder: SpeculativeDecoder
) -> None:
    arguments = {"input_ids": PADDED, "attention_mask": MASK, "max_new_tokens": 15, **GREEDY}
    got = model.generate(custom_generate=decoder, **arguments)
    assert got.tolist() == model.generate(**arguments).tolist()


@pytest.mark.parametrize(
    "config",
    [
        # `make test` has processors that read the prefix, count tokens, or know the first step.
        pytest.param(
            config, marks=() if config in PADDED_CONFIGS else pytest.mark.slow, id=str(config)
        )
        for config in CONFIGS[2:]
    ],
)
def test_padding_never_leaks_into_processors(
    model: LlamaForCausalLM, decoder: SpeculativeDecoder, config: dict[str, object]
) -> None:
    shy = {"logits_processor": LogitsProcessorList([Shy()])}
    arguments = {**GREEDY, **config, **shy}
    got = model.generate(PADDED, attention_mask=MASK, custom_generate=decoder, **arguments)
    for sequence, ids, mask in zip(got, PADDED, MASK, strict=True):
        own = ids[mask.bool()][None]
        alone = model.generate(own, attention_mask=torch.ones_like(own), **arguments)[0]
        new = alone[own.shape[1] :].tolist()
        assert sequence[len(ids) :].tolist() == new + [0] * (len(sequence) - len(ids) - len(new))


def test_the_defaults_of_generate_hold_for_both_ways_to_sample(
    model: LlamaForCausalLM, decoder: SpeculativeDecoder
) -> None:
    model.generation_config.update(do_sample=True, temperature=0.8, top_k=3)
    ids = torch.tensor([[1, 2, 3]])
    asked = {"max_new_tokens": 12, "output_scores": True, "return_dict_in_generate": True}
    mask = torch.ones_like(ids)
    ours = decoder.generate(ids, seed=5, **asked)
    theirs = model.generate(
        ids, attention_mask=mask, custom_generate=decoder, seed=5, pad_token_id=0, **asked
    )
    assert theirs.sequences.tolist() == ours.sequences.tolist()
    torch.manual_seed(0)
    reference = model.generate(ids, attention_mask=mask, pad_token_id=0, **asked)
    torch.testing.assert_close(ours.scores[0], reference.scores[0][0])
    assert all(int(scores.isfinite().sum()) == 3 for scores in ours.scores)


def test_scores_logits_and_log_probs_are_those_of_the_target(
    model: LlamaForCausalLM, decoder: SpeculativeDecoder
) -> None:
    ids = torch.tensor([[1, 2, 3]])
    asked = {
        "max_new_tokens": 15,
        "repetition_penalty": 1.2,
        "output_scores": True,
        "output_logits": True,
        "return_dict_in_generate": True,
        **GREEDY,
    }
    mask = torch.ones_like(ids)
    expected = model.generate(ids, attention_mask=mask, **asked)
    got = model.generate(ids, attention_mask=mask, custom_generate=decoder, **asked)
    output = decoder.generate(ids, log_probs=True, **asked)
    for name in ("scores", "logits"):
        theirs = torch.stack(getattr(expected, name))
        torch.testing.assert_close(torch.stack(getattr(got, name)), theirs, atol=1e-4, rtol=1e-4)
    log_probs = torch.cat(expected.scores).log_softmax(-1)
    chosen = log_probs.gather(1, torch.tensor(output.new_token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(output.log_probs), chosen, atol=1e-4, rtol=1e-4)
    assert output.depths != [0] * 15


def test_torchs_own_seed_makes_sampling_repeatable(decoder: SpeculativeDecoder) -> None:
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(decoder.generate([1, 2], temperature=1.0, max_new_tokens=10).new_token_ids)
    assert runs[0] == runs[1] != runs[2]


def test_another_models_generate_is_refused(decoder: SpeculativeDecoder) -> None:
    ids = torch.tensor([[1, 2, 3]])
    with pytest.raises(TargetMismatch, match="a model other than"):
        tiny_llama(vocab=11, seed=3).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            custom_generate=decoder,
            max_new_tokens=5,
            **GREEDY,
        )


def test_transformers_streamers_get_the_text_piece_by_piece(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_llama(vocab=len(tokenizer))
    decoder = SpeculativeDecoder(model, tiny_drafter(TargetAdapter(model)), tokenizer, tree="fixed")
    output = decoder.generate("def", max_new_tokens=12, streamer=TextStreamer(tokenizer))
    assert capsys.readouterr().out.rstrip("\n") == ("def" + output.text).rstrip("\n")
    ids = torch.tensor([tokenizer.encode("def")])
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=12,
        custom_generate=decoder,
        streamer=TextStreamer(tokenizer),
        **GREEDY,
    )
    assert capsys.readouterr().out.rstrip("\n") == ("def" + output.text).rstrip("\n")


class Ban(LogitsProcessor):
    """A processor that forbids the tokens below 6 before warpers truncate the distribution."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(1, torch.arange(6), float("-inf"))


class Enough(StoppingCriteria):
    """A criterion that ends a sequence at an even length, so after at most two new tokens."""

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] % 2 == 0)


@pytest.mark.parametrize(
    "processors",
    [[Ban()], [TopKLogitsWarper(2)], [TemperatureLogitsWarper(0.1)], [Ban(), TopKLogitsWarper(2)]],
    ids=lambda processors: "+".join(type(processor).__name__ for processor in processors),
)
def test_the_callers_processors_keep_their_order_in_padded_sequences(
    model: LlamaForCausalLM, decoder: SpeculativeDecoder, processors: list[LogitsProcessor]
) -> None:
    arguments = {
        "logits_processor": LogitsProcessorList(processors),
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 3,
        "max_new_tokens": 6,
        "pad_token_id": 0,
        "output_scores": True,
        "return_dict_in_generate": True,
    }
    got = model.generate(PADDED, attention_mask=MASK, custom_generate=decoder, seed=1, **arguments)
    for sequence, (ids, mask) in enumerate(zip(PADDED, MASK, strict=True)):
        own = ids[mask.bool()][None]
        alone = model.generate(own, attention_mask=torch.ones_like(own), **arguments)
        torch.testing.assert_close(
            got.scores[0][sequence], alone.scores[0][0], atol=1e-4, rtol=1e-4
        )


def test_the_callers_criteria_hold_in_padded_sequences(
    model: LlamaForCausalLM, decoder: SpeculativeDecoder
) -> None:
    criteria = StoppingCriteriaList([Enough()])
    arguments = {**GREEDY, "max_new_tokens": 9, "stopping_criteria": criteria}
    got = model.generate(PADDED, attention_mask=MASK, custom_generate=decoder, **arguments)
    for sequence, ids, mask in zip(got, PADDED, MASK, strict=True):
        own = ids[mask.bool()][None]
        alone = decoder.generate(own, max_new_tokens=9, stopping_criteria=criteria, temperature=0.0)
        new = sequence[len(ids) :].tolist()
        assert new[: len(alone.new_token_ids)] == alone.new_token_ids
        assert len(alone.new_token_ids) <= 2
        assert set(new[len(alone.new_token_ids) :]) <= {0}


def test_a_subclass_of_a_known_criterion_decides_for_itself(decoder: SpeculativeDecoder) -> None:
    class Early(MaxLengthCriteria):
        def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
            return torch.full((len(input_ids),), input_ids.shape[1] >= 8)

    criteria = StoppingCriteriaList([Early(30)])
    output = decoder.generate([1, 2, 3], max_new_tokens=20, stopping_criteria=criteria)
    assert len(output.new_token_ids) == 5


def test_a_longest_length_of_the_caller_replaces_that_of_the_config(
    model: LlamaForCausalLM, decoder: SpeculativeDecoder
) -> None:
    criteria = StoppingCriteriaList([MaxLengthCriteria(60)])
    arguments = {**GREEDY, "max_length": 7, "stopping_criteria": criteria}
    prompt = torch.tensor([[1, 2, 3]])
    expected = model.generate(prompt, **arguments)
    assert expected.shape[1] == 60
    assert decoder.generate(prompt, **arguments).sequences.equal(expected)
    assert model.generate(prompt, custom_generate=decoder, **arguments).equal(expected)
    for below in (2, 90):
        short = {"max_new_tokens": 4, "stopping_criteria": [MaxLengthCriteria(below)]}
        output = decoder.generate(prompt.repeat(1, 30), **arguments | short)
        assert len(output.new_token_ids) == 1
    beyond = StoppingCriteriaList([MaxLengthCriteria(10_000)])
    with pytest.raises(PromptError, match="do not fit into the target's context"):
        decoder.generate(prompt, **{**arguments, "stopping_criteria": beyond})


def test_stop_strings_hold_in_padded_sequences() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_llama(vocab=len(tokenizer))
    own = SpeculativeDecoder(model, tokenizer=tokenizer)
    prompts = [[1, 2, 3], [5, 6, 7, 8, 9]]
    arguments = {**GREEDY, "max_new_tokens": 12}
    texts = [own.generate(prompt, **arguments).text for prompt in prompts]
    stop = next(piece for piece in (texts[0][n : n + 1] for n in range(3, 9)) if piece.isascii())
    alone = [own.generate(prompt, stop_strings=stop, **arguments) for prompt in prompts]
    ids = torch.tensor([[0, 0, *prompts[0]], prompts[1]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1] * 5])
    arguments["stopping_criteria"] = StoppingCriteriaList([StopStringCriteria(tokenizer, [stop])])
    for default in (None, ["another"]):
        model.generation_config.stop_strings = default
        switch = {} if default is None else {"stop_strings": None}
        got = model.generate(ids, attention_mask=mask, custom_generate=own, **switch, **arguments)
        for sequence, output in zip(got.tolist(), alone, strict=True):
            new = output.new_token_ids
            assert sequence[5 : 5 + len(new)] == new
            assert set(sequence[5 + len(new) :]) <= {0}


def test_several_return_sequences_of_padded_sequences_are_sequences_of_their_own(
    model: LlamaForCausalLM, decoder: SpeculativeDecoder
) -> None:
    got = model.generate(
        PADDED,
        attention_mask=MASK,
        custom_generate=decoder,
        do_sample=True,
        num_return_sequences=2,
        max_new_tokens=8,
        pad_token_id=0,
        seed=1,
    )
    assert got.shape == (6, 14)
    assert len({tuple(sequence) for sequence in got.tolist()}) == 6
    assert got[:, :6].tolist() == PADDED.repeat_interleave(2, dim=0).tolist()


@pytest.mark.parametrize(
    ("name", "value"), [("encoder_no_repeat_ngram_size", 2), ("encoder_repetition_penalty", 1.5)]
)
def test_processors_that_know_their_batch_index_see_it(
    model: LlamaForCausalLM, decoder: SpeculativeDecoder, name: str, value: float
) -> None:
    ids = torch.tensor([[1, 2, 3, 4], [4, 3, 2, 1]])
    arguments = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 9,
        **GREEDY,
        name: value,
    }
    expected = model.generate(ids, **arguments)
    assert model.generate(ids, custom_generate=decoder, **arguments).tolist() == expected.tolist()


def test_other_positions_are_refused(model: LlamaForCausalLM, decoder: SpeculativeDecoder) -> None:
    ids = torch.tensor([[1, 2, 3]])
    shifted = {"position_ids": torch.tensor([[20, 21, 22]])}
    mask = {"attention_mask": torch.ones_like(ids)}
    with pytest.raises(PromptError, match="position_ids"):
        model.generate(ids, custom_generate=decoder, max_new_tokens=3, **GREEDY, **mask, **shifted)
    with pytest.raises(PromptError, match="position_ids"):
        decoder.generate(ids, **shifted)
    for name in ("streamer", "tokenizer", "cache_implementation"):
        with pytest.raises(PromptError, match=name):
            decoder.generate_batch([[1, 2]], **{name: "something"})
    with pytest.raises(PromptError, match="this is a single prompt"):
        decoder.generate_batch("text")


def test_prompts_of_ids_that_may_be_embedded_but_never_follow_are_refused() -> None:
    model = tiny_llama(vocab=11)
    model.set_input_embeddings(torch.nn.Embedding(13, model.config.hidden_size))
    decoder = SpeculativeDecoder(model, LookupDrafter(), tree="fixed")
    ids = torch.tensor([[1, 2, 12, 1, 2]])
    arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "pad_token_id": 0}
    with pytest.raises(PromptError, match=r"ids outside the target's vocabulary.*got: 12"):
        model.generate(ids, custom_generate=decoder, **arguments)
