"""Requests that join a running batch get the tokens that they get alone."""

from itertools import product
from typing import Any

import pytest
from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from helpers.quick import mostly_slow
from helpers.variants import FEEDBACK, HYBRID
from transformers import LlamaForCausalLM

from inference import SpeculativeDecoder
from inference.drafters.combined.drafter import CombinedDrafter
from inference.drafters.lookup import LookupDrafter, LookupSettings
from inference.drafters.small_lm import SmallLMDrafter
from inference.engine.loop import DecodeRun
from inference.protocol import Drafter
from inference.trees.shape import TreeShape
from jakiro.drafter import JakiroDrafter
from jakiro.errors import PromptError
from jakiro.target.adapter import TargetAdapter

FIRST = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10]]
LATER = [[3], [9, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1], [2, 1, 2, 1, 2], [7, 7]]
SEEDS = [5, 3, 8, 1, 4, 2]
LENGTHS = [12, 5, 9, 20, 7, 1]
CHOSEN = TreeShape(children=4, breadth=3, num_nodes=12)
SAMPLED = TreeShape(children=3, breadth=2, sampled=True)
TAIL = {"combine": "sum", "parallel_levels": 0, "tail_layers": 1}
# Lanes, whose sequences join in the same way, are tested with more drafters.
SETTINGS = {
    "feedback": tiny_settings(trunk=FEEDBACK),
    "hybrid": tiny_settings(parallel_levels=2, trunk=HYBRID),
    "tail": tiny_settings(**TAIL),
}
OPTIONS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "sampled": {"temperature": 0.8}}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(vocab=11)


def _trained(model: LlamaForCausalLM, name: str = "feedback") -> JakiroDrafter:
    return tiny_drafter(TargetAdapter(model), SETTINGS[name])


def _lookup(_: LlamaForCausalLM) -> Drafter:
    return LookupDrafter(LookupSettings(num_nodes=12, depth=5))


def _admit_next(
    decoder: SpeculativeDecoder, run: DecodeRun, number: int, options: dict[str, Any]
) -> None:
    prompt, seed, length = LATER[number], SEEDS[2 + number], LENGTHS[2 + number]
    indices = decoder.admit(run, [prompt], seed=[seed], max_new_tokens=length, **options)
    assert indices == [2 + number]


def _assert_alone_and_joining_are_equal(
    decoder: SpeculativeDecoder, options: dict[str, Any]
) -> None:
    """Let four requests join two others, one in every step, and compare each with itself alone."""
    run = decoder.start(FIRST, seed=SEEDS[:2], max_new_tokens=LENGTHS[0], **options)
    admitted = 0
    for number, _ in enumerate(run):
        while admitted < len(LATER) and number >= admitted:
            _admit_next(decoder, run, admitted, options)
            admitted += 1
    assert admitted == len(LATER)
    lengths = [LENGTHS[0], LENGTHS[0], *LENGTHS[2:]]
    each = zip([*FIRST, *LATER], SEEDS, lengths, run.sequences, strict=True)
    for prompt, seed, length, state in each:
        alone = decoder.generate(prompt, seed=seed, max_new_tokens=length, **options)
        assert state.new_token_ids == alone.new_token_ids
        assert state.stats.accepted == alone.stats.accepted
        assert state.stats.target_forwards == alone.stats.target_forwards


@pytest.mark.parametrize(
    "pair", mostly_slow(product(SETTINGS, OPTIONS), quick=[("hybrid", "sampled")]), ids=" ".join
)
def test_tokens_with_a_trained_drafter_are_those_of_the_request_alone(
    model: LlamaForCausalLM, pair: tuple[str, str]
) -> None:
    name, options = pair
    tree = CHOSEN if options == "greedy" else SAMPLED
    levels = SETTINGS[name].schedule.parallel_levels
    tree = tree.model_copy(update={"parallel_levels": levels})
    decoder = SpeculativeDecoder(model, _trained(model, name), tree=tree)
    _assert_alone_and_joining_are_equal(decoder, OPTIONS[options])


def test_without_a_drafter_requests_of_all_kinds_share_a_batch(model: LlamaForCausalLM) -> None:
    decoder = SpeculativeDecoder(model)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 0, "repetition_penalty": 1.4},
        {"temperature": 0.7, "repetition_penalty": 1.2},
        {"temperature": 1.0, "top_k": 4},
        {"temperature": 0.7, "top_p": 0.5},
    ]
    kinds = [kind for kind in kinds for _ in range(2)]  # two requests of each kind
    prompts, seeds = [*FIRST, *LATER] * 2, [*SEEDS, *(10 + seed for seed in SEEDS)]
    run = decoder.start([prompts[0]], seed=[seeds[0]], max_new_tokens=12, **kinds[0])
    for prompt, seed, kind in zip(prompts[1:], seeds[1:], kinds[1:], strict=True):
        decoder.admit(run, [prompt], seed=[seed], max_new_tokens=12, **kind)
    run.finish()
    for state, prompt, seed, kind in zip(run.sequences, prompts, seeds, kinds, strict=True):
        alone = decoder.generate(prompt, seed=seed, max_new_tokens=12, **kind)
        assert state.new_token_ids == alone.new_token_ids


@pytest.mark.parametrize("name", ["feedback", "lookup", "pair"])
def test_a_run_goes_on_if_all_sequences_were_complete(model: LlamaForCausalLM, name: str) -> None:
    drafters: dict[str, Any] = {"feedback": _trained, "lookup": _lookup}
    drafters["pair"] = lambda model: CombinedDrafter(
        SmallLMDrafter(tiny_llama(vocab=11, seed=7), model), LookupDrafter()
    )
    decoder = SpeculativeDecoder(model, drafters[name](model), tree="fixed")
    run = decoder.start(FIRST, max_new_tokens=3, temperature=0)
    for step in run:
        if all(each.finished for each in step) and len(run.sequences) == len(FIRST):
            assert not run.live
            decoder.admit(run, LATER, max_new_tokens=7, temperature=0)
    for state, prompt in zip(run.sequences[2:], LATER, strict=True):
        alone = decoder.generate(prompt, max_new_tokens=7, temperature=0)
        assert state.new_token_ids == alone.new_token_ids


def test_a_single_seed_gives_every_sequence_of_a_run_other_random_numbers(
    model: LlamaForCausalLM,
) -> None:
    decoder = SpeculativeDecoder(model)
    options: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 12, "seed": 5}
    run = decoder.start([[1, 2]], **options)
    decoder.admit(run, [[1, 2]], **options)
    decoder.admit(run, [[1, 2]], **options)
    first, *others = (state.new_token_ids for state in run.finish().sequences)
    assert first == decoder.generate([1, 2], **options).new_token_ids
    assert len({tuple(ids) for ids in (first, *others)}) == 3


def test_with_a_drafter_trees_must_have_the_same_shape(model: LlamaForCausalLM) -> None:
    decoder = SpeculativeDecoder(model, _trained(model), tree="fixed")
    run = decoder.start(FIRST, max_new_tokens=3, temperature=0)
    with pytest.raises(PromptError, match="another decoder"):
        SpeculativeDecoder(model).admit(run, LATER)
    with pytest.raises(PromptError, match="select tokens in different ways"):
        decoder.admit(run, LATER, max_new_tokens=3, temperature=0.5)
    run.finish()
    with pytest.raises(PromptError, match="a closed run"):
        decoder.admit(run, LATER, max_new_tokens=3, temperature=0)


def test_a_run_that_learns_numbers_the_requests_that_join(model: LlamaForCausalLM) -> None:
    decoder = SpeculativeDecoder(model, _trained(model), tree="auto")
    run = decoder.start(FIRST, max_new_tokens=3, temperature=0.8)
    decoder.admit(run, LATER[:1], seed=1, max_new_tokens=3, temperature=0.8)
    decoder.admit(run, LATER[1:2], seed=1, max_new_tokens=3, temperature=0.8)
    numbers = [state.request.sampling.request_index for state in run.sequences]
    assert len(set(numbers[1:])) == 3
    run.close()
