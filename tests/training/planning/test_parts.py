"""The parts of a training step together perform the operations of the whole step."""

import pytest
from helpers.models import tiny_settings
from helpers.training import batch_for, tiny_training
from helpers.variants import FEEDBACK, FUSED, HYBRID

from jakiro.drafter_settings import DrafterSettings
from training.planning.parts import flops_of, parts_of


@pytest.mark.parametrize("weight", [0.0, 0.1])
@pytest.mark.parametrize(
    "settings",
    [
        tiny_settings(),
        tiny_settings(combine="sum", trunk=FEEDBACK),
        tiny_settings(trunk=FUSED),
        tiny_settings(trunk=HYBRID),
    ],
    ids=["moa", "feedback", "fused", "hybrid"],
)
def test_parts_do_the_arithmetic_of_the_whole_again_and_again(
    settings: DrafterSettings, weight: float
) -> None:
    tiny, batch = tiny_training(settings), batch_for(settings, [10, 11], [24])
    reader = tiny.reader(batch.token_ids.shape[1])
    objective = tiny.objective.model_copy(update={"accepted_length_weight": weight})
    parts = parts_of(tiny.drafter, reader, batch, objective)
    whole = flops_of(lambda: tiny.loss(batch, accepted_length_weight=weight).total.backward())
    for _ in range(2):
        # No part includes the mixing of the experts' features before they are fed back.
        assert sum(map(flops_of, parts.values())) == pytest.approx(whole, rel=0.005)
