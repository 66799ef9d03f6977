"""The arguments of a drafter's modules follow from its config."""

import pytest
from helpers.models import tiny_drafter, tiny_llama
from helpers.variants import VARIANTS

from jakiro.architecture import encoder_arguments, experts_arguments, trunk_arguments
from jakiro.experts import MixtureOfExperts
from jakiro.target.adapter import TargetAdapter
from moa.memory import MemoryEncoder
from moa.trunk import Trunk


@pytest.mark.parametrize("name", ["E2-sum-P1", "feedback-fused", "eagle3.1", "hybrid-long-context"])
def test_modules_built_from_a_config_take_the_weights_of_the_drafter(name: str) -> None:
    target = TargetAdapter(tiny_llama(num_hidden_layers=3))
    drafter = tiny_drafter(target, VARIANTS[name])
    memory, features = encoder_arguments(drafter.config)
    built = {
        "trunk": Trunk(**trunk_arguments(drafter.config)),
        "experts": MixtureOfExperts(**experts_arguments(drafter.config)),
        "memory_encoder": None if memory is None else MemoryEncoder(**memory),
        "feature_encoder": None if features is None else MemoryEncoder(**features),
    }
    for part, module in built.items():
        own = getattr(drafter, part)
        assert (module is None) is (own is None)
        if module is not None:
            module.load_state_dict(own.state_dict())
