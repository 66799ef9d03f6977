"""Whatever the format of a drafter's weights, the output is that of the target."""

from collections import Counter

import pytest
import torch
from helpers.chi_square import p_value, probs_of_continuations
from helpers.drafting import prefilled
from helpers.losslessness import LEAST_P_VALUE, greedy_by_transformers
from helpers.models import tiny_drafter, tiny_llama
from helpers.quick import mostly_slow
from helpers.variants import VARIANTS
from transformers import PreTrainedModel

from inference import SpeculativeDecoder
from inference.draft_tree import SparseDistribution
from inference.drafters.trained.converted import head_form
from inference.drafters.trained.drafter import TrainedDrafter
from inference.protocol import Budget
from inference.sampling.random_numbers import StepRandom
from inference.trees import builder
from inference.trees.shape import TreeShape
from jakiro.drafter import JakiroDrafter
from jakiro.target import int8
from jakiro.target.adapter import TargetAdapter
from jakiro.target.weights import WEIGHT_FORMS, WeightForm

_TARGET = TargetAdapter(tiny_llama())
FORMS = [
    form for form in WEIGHT_FORMS[1:] if head_form(tiny_drafter(_TARGET), _TARGET, [form]) == form
]
KINDS = ["E2-mixture-P2", "feedback-fused", "hybrid-tail-1", "kv-subset-projected"]
TREES = {
    "deterministic": TreeShape(children=4, breadth=3, num_nodes=12),
    "sampled": TreeShape(children=3, breadth=2, sampled=True),
}
needs_int8 = pytest.mark.skipif("int8" not in FORMS, reason="torch lacks int8 products")


def _drafter(model: PreTrainedModel, name: str, vocab: int | None = None) -> JakiroDrafter:
    settings = VARIANTS[name].model_copy(update={"draft_vocab_size": vocab})
    drafter = tiny_drafter(TargetAdapter(model), settings)
    if drafter.draft_ids is not None:  # not the ids 0, 1, 2, ..., which would equal their indices
        drafter.draft_ids.copy_(2 * torch.arange(len(drafter.draft_ids)) + 1)
    return drafter


def _decoder(
    model: PreTrainedModel, drafter: JakiroDrafter, form: WeightForm, tree: TreeShape | None = None
) -> SpeculativeDecoder:
    """Return a decoder that drafts with weights in one format."""
    own = TrainedDrafter.for_target(drafter, TargetAdapter(model), trees=tree, forms=[form])
    assert own.forms == (form, form)
    return SpeculativeDecoder(model, own, tree="fixed")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", mostly_slow(KINDS, quick=["E2-mixture-P2", "hybrid-tail-1"]))
def test_greedy_tokens_are_the_targets_in_every_form(form: WeightForm, name: str) -> None:
    model = tiny_llama(vocab=11)
    for vocab in (None, 5):
        decoder = _decoder(model, _drafter(model, name, vocab), form)
        prompts = [[1, 2, 3], [3]]
        together = decoder.generate_batch(prompts, max_new_tokens=14)
        for prompt, output in zip(prompts, together, strict=True):
            assert output.sequences[0].tolist() == greedy_by_transformers(model, prompt, 14)
        assert any(output.stats.accepted.total() for output in together)


def _p_value(tree: TreeShape, runs: int) -> float:
    """Return the p-value of sampled continuations; 0 if one of them has probability 0.

    Callers reduce the levels of the inputs of int8 products, so that the drafts differ greatly from
    those of the drafter's own weights.
    """
    model, sampling = tiny_llama(vocab=7), {"temperature": 1.0, "top_p": 0.9}
    drafter = _drafter(model, "E2-mixture-P1")
    decoder = _decoder(model, drafter, "int8", tree)
    outputs = decoder.generate_batch([[1, 2]] * runs, seed=0, max_new_tokens=3, **sampling)
    assert sum(output.stats.accepted.total() for output in outputs) > 0
    counts = Counter(tuple(output.new_token_ids) for output in outputs)
    probs = probs_of_continuations(model, [1, 2], 3, **sampling)
    return p_value(counts, probs) if set(counts) <= set(probs) else 0.0


@needs_int8
@pytest.mark.parametrize("tree", ["sampled", pytest.param("deterministic", marks=pytest.mark.slow)])
def test_sampled_tokens_have_the_target_distribution_with_coarse_int8_products(
    tree: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(int8, "_LEVELS", 1)
    assert _p_value(TREES[tree], 2_000) > LEAST_P_VALUE


@needs_int8
@pytest.mark.slow
def test_probabilities_other_than_those_of_int8_products_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = builder._recorded

    def flatter(levels: list[builder.TreeLevel], num_nodes: int) -> SparseDistribution:
        recorded = original(levels, num_nodes)
        probs = recorded.probs.sqrt()
        total = probs.sum(-1, keepdim=True).clamp(min=1e-9)
        return SparseDistribution(recorded.ids, probs / total)

    monkeypatch.setattr(int8, "_LEVELS", 1)
    monkeypatch.setattr(builder, "_recorded", flatter)
    assert _p_value(TREES["sampled"], 2_000) < LEAST_P_VALUE


@pytest.mark.skipif("packed" not in FORMS, reason="torch cannot multiply by reordered weights")
@torch.no_grad()
def test_a_packed_drafter_drafts_the_same_trees_and_its_model_is_unchanged() -> None:
    target = TargetAdapter(tiny_llama())
    tokens = torch.arange(9)[None]
    for name in KINDS:
        model = tiny_drafter(target, VARIANTS[name])
        before = {name: type(module) for name, module in model.named_modules()}
        parallel = model.config.settings.schedule.parallel_levels
        shape = TreeShape(parallel_levels=parallel)
        own = TrainedDrafter(model, target, shape)
        packed = TrainedDrafter(model, target, shape, ["packed"])
        assert {name: type(module) for name, module in model.named_modules()} == before
        assert packed.network is not model
        assert packed.model is model
        expected, tree = (
            prefilled(each, tokens, 8)[0].propose(Budget(8), StepRandom()) for each in (own, packed)
        )
        assert torch.equal(tree.token_ids, expected.token_ids)
        torch.testing.assert_close(tree.score, expected.score, atol=1e-4, rtol=1e-4)
        assert packed.bytes_per_token == own.bytes_per_token
