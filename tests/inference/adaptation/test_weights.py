"""Weights are replaced in place, wherever copies of them are in use, and never half."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from helpers.drafting import prefilled
from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from helpers.quick import mostly_slow
from helpers.variants import VARIANTS

from inference import SpeculativeDecoder
from inference.adaptation.weights import (
    ReplaceableWeights,
    adapted_ends,
    adapted_names,
    identity_of_drafter,
)
from inference.drafters.trained.drafter import TrainedDrafter, default_tree
from inference.protocol import Budget
from inference.sampling.random_numbers import StepRandom
from jakiro.drafter_settings import DrafterSettings
from jakiro.errors import CheckpointError
from jakiro.target.adapter import TargetAdapter
from jakiro.target.weights import WEIGHT_FORMS, WeightForm
from training.input_settings import LoraSettings
from training.setup.adapters import add_adapters

KINDS: list[dict[str, Any]] = [
    {},
    {"trunk": {"kind": "hybrid"}},
    {"trunk": {"kind": "feedback"}, "head": "own"},
]


def _other(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    parameters = dict(model.named_parameters())
    names = adapted_names(model)
    return {
        name: parameters[name].detach() + 0.3 * torch.randn_like(parameters[name]) for name in names
    }


def test_all_layers_of_a_trunk_are_replaced() -> None:
    settings = tiny_settings(trunk={"kind": "feedback", "num_layers": 3})
    drafter = tiny_drafter(TargetAdapter(tiny_llama()), settings)
    names = adapted_names(drafter)
    trained = deepcopy(drafter)
    add_adapters(trained, LoraSettings(rank=2, targets=adapted_ends(drafter)))
    learned = [name for name, weight in trained.named_parameters() if weight.requires_grad]
    assert len(learned) == 2 * len(names)  # LoRA learns two matrices for each
    assert sum(name.endswith("self_attention.project.weight") for name in names) == 3


@pytest.mark.parametrize(
    "settings", [*(tiny_settings(**kind) for kind in KINDS), VARIANTS["block"]]
)
@torch.no_grad()
def test_memory_does_not_depend_on_adapted_weights(settings: DrafterSettings) -> None:
    target = TargetAdapter(tiny_llama())
    model = tiny_drafter(target, settings)
    drafter = TrainedDrafter(model, target, default_tree(model))
    session, output = prefilled(drafter, torch.randint(0, 61, (1, 7)), 6)
    before, tree = drafter.encode_memory(output).tensors, session.propose(Budget(9), StepRandom())
    for name, weight in _other(model).items():
        model.get_parameter(name).copy_(weight)
    assert all(map(torch.equal, before, drafter.encode_memory(output).tensors))
    assert not torch.equal(tree.score, session.propose(Budget(9), StepRandom()).score)


@pytest.mark.parametrize("form", mostly_slow(WEIGHT_FORMS, quick=["own"]))
def test_a_decoder_drafts_with_the_new_weights_and_then_with_its_own(form: WeightForm) -> None:
    model = tiny_llama()
    target = TargetAdapter(model)
    drafter = tiny_drafter(target)
    decoder = SpeculativeDecoder(
        model, TrainedDrafter(drafter, target, default_tree(drafter), [form]), tree="fixed"
    )
    weights = ReplaceableWeights(drafter)
    other = _other(drafter)
    expected = tiny_drafter(target)
    expected.load_state_dict({**expected.state_dict(), **other})
    afresh = SpeculativeDecoder(
        model, TrainedDrafter(expected, target, default_tree(expected), [form]), tree="fixed"
    )
    options: dict[str, Any] = {"max_new_tokens": 20, "temperature": 1.0, "seed": 3}

    def run(used: SpeculativeDecoder) -> tuple[list[int], Any]:
        output = used.generate([1, 2, 3], **options)
        return output.new_token_ids, output.stats.accepted

    own = run(decoder)
    weights.check(other)
    weights.use(other)
    assert run(decoder) == run(afresh) != own
    weights.use(None)
    assert run(decoder) == own


def test_weights_of_another_drafter_are_refused() -> None:
    drafter = tiny_drafter(TargetAdapter(tiny_llama()))
    weights, other = ReplaceableWeights(drafter), _other(drafter)
    missing = {name: weight for name, weight in other.items() if name != "experts.down"}
    with pytest.raises(CheckpointError, match="do not belong"):
        weights.check(missing)
    with pytest.raises(CheckpointError, match="do not belong"):
        weights.check({**other, "experts.down": other["experts.down"][:1]})
    with pytest.raises(CheckpointError, match="do not belong"):
        weights.check({**other, "memory_encoder.output.bias": torch.zeros(32)})
    for value in (float("nan"), float("inf")):
        with pytest.raises(CheckpointError, match="finite numbers"):
            weights.check({**other, "experts.down": other["experts.down"] * value})


def test_the_identity_depends_on_the_weights_and_the_target_but_not_on_their_dtype() -> None:
    target = TargetAdapter(tiny_llama())
    drafter = tiny_drafter(target)
    own = identity_of_drafter(drafter, "target", torch.bfloat16)
    assert identity_of_drafter(drafter, "another", torch.bfloat16) != own
    assert identity_of_drafter(tiny_drafter(target, seed=2), "target", torch.bfloat16) != own
    assert identity_of_drafter(drafter.to(torch.bfloat16), "target", torch.bfloat16) == own
