"""A replayed text has the steps with which it was decoded, for drafters of every kind."""

from typing import Any

import pytest
from helpers.models import tiny_drafter, tiny_llama
from helpers.quick import mostly_slow
from helpers.variants import VARIANTS
from transformers import LlamaForCausalLM

from inference import SpeculativeDecoder
from inference.benchmark.replay.steps import replay
from inference.drafters.lookup import LookupDrafter
from inference.drafters.small_lm import SmallLMDrafter, SmallLMSettings
from inference.engine.stats import DecodeStats
from inference.trees.shape import TreePlan, TreeShape
from jakiro.errors import ConfigError
from jakiro.target.adapter import TargetAdapter

PROMPTS = [[5, 6, 7], [9], [3, 1, 4, 1, 5, 9, 2, 6, 5], [8, 8]]
LIMIT = 16
QUICK = (
    "E8-2-active-sum",
    "chimera",
    "eagle3",
    "hybrid-mixture-P2",
    "parallel-spec",
    "tail-1",
)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


def _counts(stats: DecodeStats) -> dict[str, Any]:
    counts = dict(vars(stats))
    del counts["seconds"], counts["autoregressive_seconds"]
    return counts


def _same_steps(
    decoder: SpeculativeDecoder, temperature: float, **options: Any
) -> list[DecodeStats]:
    """Decode prompts, replay the texts, and return their counts, which must be the same."""
    options |= {"temperature": temperature, "max_new_tokens": LIMIT}
    seeds = list(range(len(PROMPTS)))
    outputs = decoder.generate_batch(PROMPTS, seed=seeds, **options)
    run = decoder.start(PROMPTS, seed=0, **options)
    replayed = replay(run, [output.new_token_ids for output in outputs])
    assert run.is_closed
    assert list(map(_counts, replayed)) == [_counts(output.stats) for output in outputs]
    return replayed


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", mostly_slow(sorted(VARIANTS), quick=QUICK))
def test_trained_drafters(model: LlamaForCausalLM, name: str, temperature: float) -> None:
    drafter = tiny_drafter(TargetAdapter(model), VARIANTS[name])
    shape = TreeShape(**drafter.levels, children=5, num_nodes=30)
    _same_steps(SpeculativeDecoder(model, drafter, tree=TreePlan.of(shape)), temperature, top_k=4)


def test_a_smaller_model_and_texts_that_end_at_different_places(model: LlamaForCausalLM) -> None:
    small = SmallLMDrafter(model, model, SmallLMSettings(depth=4, children=2, breadth=2))
    decoder = SpeculativeDecoder(model, small, tree="fixed")
    full = decoder.generate(PROMPTS[0], temperature=0.0, max_new_tokens=LIMIT).new_token_ids
    counts = _same_steps(decoder, 0.0, eos_token_id=full[5])
    assert sum(stats.accepted.total() for stats in counts) > 0


@pytest.mark.slow
def test_a_long_text_moves_as_a_whole_when_a_shorter_one_ends(model: LlamaForCausalLM) -> None:
    drafter = tiny_drafter(TargetAdapter(model))
    shape = TreeShape(**drafter.levels, children=2, num_nodes=4)
    decoder = SpeculativeDecoder(model, drafter, tree=TreePlan.of(shape))
    options: dict[str, Any] = {"temperature": 1.0, "top_k": 2, "max_new_tokens": 110}
    (output,) = decoder.generate_batch(PROMPTS[:1], seed=0, **options)
    assert output.stats.accepted
    run = decoder.start([PROMPTS[1], PROMPTS[0]], seed=0, **options)
    _, replayed = replay(run, [[4, 5], output.new_token_ids])
    assert _counts(replayed) == _counts(output.stats)


def test_drafters_whose_steps_do_not_follow_from_a_text_are_refused(
    model: LlamaForCausalLM,
) -> None:
    sampled = SmallLMDrafter(model, model, SmallLMSettings(depth=2, children=2, breadth=2))
    for drafter, fault in ((sampled, "samples its candidates"), (LookupDrafter(), "learns from")):
        decoder = SpeculativeDecoder(model, drafter, tree="fixed")
        run = decoder.start(PROMPTS, temperature=1.0, max_new_tokens=LIMIT)
        with pytest.raises(ConfigError, match=fault):
            replay(run, [[4]] * len(PROMPTS))
        assert run.is_closed


def test_trees_whose_sizes_depend_on_measured_times_are_refused(model: LlamaForCausalLM) -> None:
    decoder = SpeculativeDecoder(model, tiny_drafter(TargetAdapter(model)), tree="auto")
    run = decoder.start(PROMPTS[:1], temperature=0.0, max_new_tokens=LIMIT)
    with pytest.raises(ConfigError, match="chooses the sizes of its trees"):
        replay(run, [[4]])


def test_trees_are_cut_where_the_target_reads_no_further_tokens(model: LlamaForCausalLM) -> None:
    decoder = SpeculativeDecoder(model, tiny_drafter(TargetAdapter(model)), tree="fixed")
    prompt = [1 + index % 50 for index in range(model.config.max_position_embeddings - LIMIT)]
    (output,) = decoder.generate_batch([prompt], temperature=0.0, max_new_tokens=LIMIT)
    run = decoder.start([prompt], temperature=0.0, max_new_tokens=LIMIT)
    (replayed,) = replay(run, [output.new_token_ids])
    assert _counts(replayed) == _counts(output.stats)
