"""With every kind of drafter, the output is what the target alone would give."""

from collections import Counter

import pytest
import torch
from helpers.chi_square import p_value, probs_of_continuations
from helpers.families import tiny_family
from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from helpers.quick import mostly_slow
from helpers.variants import EAGLE, FEEDBACK, GRID, HYBRID, OWN, VARIANTS, WIDE
from torch import Tensor
from transformers import PreTrainedModel

from inference import SpeculativeDecoder
from inference.conversation import Conversation
from inference.engine import context
from inference.outputs import GenerateOutput
from inference.trees.shape import TreeShape
from jakiro.drafter_settings import DrafterSettings
from jakiro.target.adapter import TargetAdapter

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [3], [9, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1]]
NEW = 14
TAIL = {"combine": "sum", "parallel_levels": 0}
KINDS = {
    "feedback": tiny_settings(trunk=FEEDBACK),
    "feedback-fused": tiny_settings(combine="sum", trunk=FEEDBACK | {"fusion_layers": (0, 2, 3)}),
    "hybrid": tiny_settings(parallel_levels=2, trunk=HYBRID),
    "sparse": tiny_settings(8, parallel_levels=1, active_experts=2, trunk=HYBRID),
    "sparse-one": VARIANTS["E8-1-active"],
    "sparse-sixteen": VARIANTS["E16-2-active-P2"],
    "feedback-two-experts": VARIANTS["feedback-mixture-P2"],
    "memory-hidden": VARIANTS["hidden"],
    "memory-start": VARIANTS["layer-input"],  # memory is the input of the target's last layer
    "memory-not-rotated": VARIANTS["kv-not-rotated"],
    "fused-hybrid": VARIANTS["hybrid-sum-hidden-fused"],
    "hybrid-tail-1": VARIANTS["hybrid-tail-1"],
    "tail-1": tiny_settings(**TAIL, tail_layers=1),
    "draft-vocabulary": tiny_settings(parallel_levels=2, draft_vocab_size=5),
    "eagle": tiny_settings(1, "sum", 0, trunk=EAGLE, norm_eps=1e-3),
    "eagle3": tiny_settings(1, "sum", 0, trunk=WIDE, draft_vocab_size=5, **OWN),
    "chimera": VARIANTS["chimera"],
    "gumiho": VARIANTS["gumiho"],
    "parallel-spec": VARIANTS["parallel-spec"],
    "masks-E2": VARIANTS["masks-E2"],
    "tensor": VARIANTS["tensor"],
    "hidden-transfer": VARIANTS["hidden-transfer"],
    "block": VARIANTS["block-recurrent"].model_copy(update={"draft_vocab_size": 5}),
    "block-mixture-E2": VARIANTS["block-mixture-E2"],
    "block-dspark": VARIANTS["block-dspark"].model_copy(update={"draft_vocab_size": 5}),
    "masks-path": VARIANTS["masks-path"],
}
# The others are slow tests: their code also runs in these, or in the tests of recorded steps.
QUICK = {"feedback", "sparse", "tail-1", "draft-vocabulary", "gumiho", "hidden-transfer", "block"}
# The kinds whose sessions differ most in what they keep; the others are slow tests.
MOST_UNLIKE = mostly_slow(KINDS, quick=["feedback", "tail-1", "gumiho"])


def _decoder(
    model: PreTrainedModel, settings: DrafterSettings, sampled: bool = False
) -> SpeculativeDecoder:
    drafter = tiny_drafter(TargetAdapter(model), settings)
    if drafter.draft_ids is not None:  # not the ids 0, 1, 2, ..., which would equal their indices
        drafter.draft_ids.copy_(2 * torch.arange(len(drafter.draft_ids)) + 1)
    schedule = settings.schedule
    size = {"children": 3, "breadth": 2} if sampled else {"children": 4, "breadth": 3}
    tree = TreeShape(
        autoregressive_levels=schedule.autoregressive_levels,
        parallel_levels=schedule.parallel_levels,
        num_nodes=12,
        sampled=sampled,
        **size,
    )
    return SpeculativeDecoder(model, drafter, tree=tree)


def _alone(model: PreTrainedModel, prompt: list[int], count: int = NEW) -> list[list[int]]:
    ids = torch.tensor([prompt])
    arguments = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
    sequences: Tensor = model.generate(ids, max_new_tokens=count, **arguments)
    return sequences.tolist()


def _accepted(outputs: list[GenerateOutput]) -> int:
    return sum(output.stats.accepted.total() for output in outputs)


def assert_greedy_tokens_are_the_targets(model: PreTrainedModel, settings: DrafterSettings) -> None:
    """Compare greedy tokens, alone and in a ragged batch, with the target's."""
    decoder = _decoder(model, settings)
    together = decoder.generate_batch(PROMPTS, max_new_tokens=NEW)
    for prompt, output in zip(PROMPTS, together, strict=True):
        alone = decoder.generate(prompt, max_new_tokens=NEW)
        assert output.sequences.tolist() == _alone(model, prompt)
        assert alone.new_token_ids == output.new_token_ids
        assert alone.depths == output.depths
    assert _accepted(together) > 0


@pytest.mark.parametrize("name", mostly_slow(KINDS, quick=QUICK))
def test_greedy_tokens_alone_and_in_a_batch_are_the_targets(name: str) -> None:
    assert_greedy_tokens_are_the_targets(tiny_llama(vocab=11), KINDS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", GRID)
def test_greedy_tokens_are_the_targets_for_all_that_is_offered(name: str) -> None:
    settings = GRID[name]
    if settings.draft_vocab_size:
        settings = settings.model_copy(update={"draft_vocab_size": 5})
    assert_greedy_tokens_are_the_targets(tiny_llama(vocab=11), settings)


@pytest.mark.parametrize("family", [pytest.param("mistral", marks=pytest.mark.slow), "gemma3"])
def test_a_tail_with_a_window_drafts_losslessly_beyond_it(family: str) -> None:
    settings = tiny_settings(**TAIL, tail_layers=2)
    assert_greedy_tokens_are_the_targets(tiny_family(family, vocab_size=11), settings)


@pytest.mark.parametrize("name", MOST_UNLIKE)
def test_turns_of_a_conversation_are_fresh_starts(name: str) -> None:
    model = tiny_llama(vocab=11)
    decoder, prompt, outputs = _decoder(model, KINDS[name]), [5], []
    with Conversation() as conversation:
        for turn in range(3):
            got = decoder.generate(prompt, max_new_tokens=9, conversation=conversation)
            fresh = decoder.generate(prompt, max_new_tokens=9)
            assert got.sequences.tolist() == _alone(model, prompt, 9)
            assert got.depths == fresh.depths  # the drafts are the same as well
            outputs.append(got)
            prompt = [*prompt, *got.new_token_ids, 4 + turn, 5]
        shorter = decoder.generate(prompt[:7], max_new_tokens=9, conversation=conversation)
        assert shorter.sequences.tolist() == _alone(model, prompt[:7], 9)
    assert _accepted(outputs) > 0


@pytest.mark.parametrize("name", MOST_UNLIKE)
def test_prompts_read_in_chunks_give_the_same_drafts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = _decoder(tiny_llama(vocab=11), KINDS[name])
    whole = decoder.generate_batch(PROMPTS, max_new_tokens=9)
    for chunk in (1, 4):
        monkeypatch.setattr(context, "PREFILL_CHUNK", chunk)
        chunked = decoder.generate_batch(PROMPTS, max_new_tokens=9)
        assert [each.new_token_ids for each in chunked] == [each.new_token_ids for each in whole]
        assert [each.depths for each in chunked] == [each.depths for each in whole]


BATCH = 2_500


@pytest.mark.slow
@pytest.mark.parametrize("sampled", [False, True], ids=["deterministic", "sampled"])
@pytest.mark.parametrize("name", KINDS)
def test_sampled_sequences_of_every_kind_have_the_target_distribution(
    name: str, sampled: bool
) -> None:
    # More tokens than are drafted, and distributions so wide that some drafts are rejected.
    model, sampling = tiny_llama(vocab=13, initializer_range=0.15), {"temperature": 1.0, "top_k": 0}
    decoder = _decoder(model, KINDS[name], sampled)
    probs = probs_of_continuations(model, [1, 2], 3, **sampling)
    outputs = [
        output
        for seed in range(6)
        for output in decoder.generate_batch(
            [[1, 2]] * BATCH, seed=seed, max_new_tokens=3, **sampling
        )
    ]
    counts = Counter(tuple(output.new_token_ids) for output in outputs)
    assert set(counts) <= set(probs)
    assert p_value(counts, probs) > 0.001 / (2 * len(KINDS))
    assert _accepted(outputs) > 0
