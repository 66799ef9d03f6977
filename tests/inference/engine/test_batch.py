"""Sequences that are decoded together get the tokens that they get alone."""

import itertools

import pytest
import torch
from helpers.models import tiny_drafter, tiny_llama
from helpers.quick import mostly_slow
from torch import Tensor
from transformers import LlamaForCausalLM, LogitsProcessorList, TopKLogitsWarper

from inference import SpeculativeDecoder
from inference.engine.context import Context
from inference.trees.shape import TreeShape
from jakiro.errors import PromptError
from jakiro.target.adapter import TargetAdapter

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [3], [9, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1]]
TREES = {
    "deterministic": TreeShape(children=4, breadth=3, num_nodes=12),
    "sampled": TreeShape(children=3, breadth=2, sampled=True),
}


def _decoder(model: LlamaForCausalLM, name: str = "deterministic") -> SpeculativeDecoder:
    return SpeculativeDecoder(model, tiny_drafter(TargetAdapter(model)), tree=TREES[name])


@pytest.mark.parametrize(
    "config", [{"repetition_penalty": 1.3}, {"min_new_tokens": 9, "eos_token_id": 4}], ids=str
)
def test_every_row_of_a_ragged_batch_equals_its_prompt_alone(config: dict[str, float]) -> None:
    decoder = _decoder(tiny_llama(vocab=11))
    together = decoder.generate_batch(PROMPTS, max_new_tokens=14, **config)
    assert sum(output.stats.accepted.total() for output in together) > 0
    for prompt, output in zip(PROMPTS, together, strict=True):
        alone = decoder.generate(prompt, max_new_tokens=14, **config)
        assert output.new_token_ids == alone.new_token_ids
        assert output.depths == alone.depths
        assert output.stats.tau == alone.stats.tau


@pytest.mark.parametrize("name", mostly_slow(TREES, quick=["sampled"]))
def test_a_row_with_a_seed_of_its_own_draws_what_it_draws_alone(name: str) -> None:
    decoder = _decoder(tiny_llama(vocab=11), name)
    arguments = {"max_new_tokens": 10, "temperature": 0.7}
    together = decoder.generate_batch(PROMPTS, seed=[5, 3, 5, 4], **arguments)
    for prompt, seed, output in zip(PROMPTS, (5, 3, 5, 4), together, strict=True):
        alone = decoder.generate(prompt, seed=seed, **arguments)
        assert output.new_token_ids == alone.new_token_ids
    with pytest.raises(PromptError, match=r"one seed, or 4 seeds; got: 2 seeds"):
        decoder.generate_batch(PROMPTS, seed=[1, 2], **arguments)


def test_rows_end_on_their_own_and_leave_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    original = Context.select_sequences

    def noted(self: Context, indices: list[int]) -> None:
        kept.append(len(indices))
        original(self, indices)

    monkeypatch.setattr(Context, "select_sequences", noted)
    decoder = _decoder(tiny_llama(vocab=11))
    alone = [decoder.generate(prompt, max_new_tokens=16) for prompt in PROMPTS]
    eos = alone[0].new_token_ids[4]
    together = decoder.generate_batch(PROMPTS, max_new_tokens=16, eos_token_id=eos)
    for before, output in zip(alone, together, strict=True):
        full = before.new_token_ids
        assert output.new_token_ids == (full[: full.index(eos) + 1] if eos in full else full)
    assert kept == sorted(kept, reverse=True)
    assert kept


def test_a_padded_tensor_gives_what_its_rows_give() -> None:
    decoder = _decoder(tiny_llama(vocab=11))
    width = max(map(len, PROMPTS))
    padded = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    got = decoder.generate_batch(padded, attention_mask=mask, max_new_tokens=9)
    expected = decoder.generate_batch(PROMPTS, max_new_tokens=9)
    assert [each.new_token_ids for each in got] == [each.new_token_ids for each in expected]


def test_rows_near_the_end_of_the_context_draft_less_than_others() -> None:
    model = tiny_llama(vocab=11, max_position_embeddings=24)
    decoder = SpeculativeDecoder(
        model,
        tiny_drafter(TargetAdapter(model)),
        tree=TreeShape(autoregressive_levels=5, children=2, num_nodes=9),
    )
    prompts = [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]
    together = decoder.generate_batch(prompts, max_new_tokens=14)
    for prompt, output in zip(prompts, together, strict=True):
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        own = {"attention_mask": mask, "do_sample": False, "pad_token_id": 0}
        expected = model.generate(ids, max_new_tokens=14, **own)
        assert output.sequences.tolist() == expected.tolist()


def test_constraints_that_depend_on_the_row_are_refused_for_several_prompts() -> None:
    decoder = _decoder(tiny_llama(vocab=11))
    even = {"prefix_allowed_tokens_fn": lambda _row, _ids: [2, 4, 6], "max_new_tokens": 9}
    assert set(decoder.generate([1, 2], **even).new_token_ids) <= {2, 4, 6}
    with pytest.raises(PromptError, match="prefix_allowed_tokens_fn"):
        decoder.generate_batch(PROMPTS, **even)


class TopOfTheMorning(TopKLogitsWarper):
    """A processor that reads the prefix, although the class it derives from does not."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.scatter(1, input_ids[:, -1:], float("-inf"))


def test_what_derives_from_a_warper_still_sees_each_rows_own_tokens() -> None:
    decoder = _decoder(tiny_llama(vocab=11))
    processors = LogitsProcessorList([TopOfTheMorning(3)])
    arguments = {"logits_processor": processors, "temperature": 1.0, "max_new_tokens": 12}
    for output in decoder.generate_batch(PROMPTS, seed=1, **arguments):
        tokens = output.sequences[0].tolist()[-13:]
        assert all(one != other for one, other in itertools.pairwise(tokens))
