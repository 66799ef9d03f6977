"""Arms of equal size: the experts' width makes up for what an arm adds or takes away."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from jakiro.config import DrafterSettings, config_for
from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError
from jakiro.target_record import TargetRecord
from training.ablation.arms import Arm

TOLERANCE = 0.02  # of the base's number of parameters


@dataclass(frozen=True)
class SizedArm:
    """An arm whose experts were made wider or narrower until it was as large as the base."""

    arm: Arm
    parameters: int
    width_before: int  # as the base has it

    @property
    def name(self) -> str:
        """The arm's name."""
        return self.arm.name

    @property
    def width(self) -> int:
        """Inner width of an expert."""
        return self.arm.settings.drafter.bank.expert_width


def equally_sized(arms: Sequence[Arm], target: TargetRecord) -> list[SizedArm]:
    """Return the arms with as many trainable parameters as the first one.

    Raises:
        ConfigError: no expert width brings an arm within 2% of it.
    """
    goal = num_parameters(arms[0].settings.drafter, target)
    return [_sized(arm, goal, target) for arm in arms]


def num_parameters(settings: DrafterSettings, target: TargetRecord) -> int:
    """Return how many trainable parameters a drafter has; none of them is allocated."""
    with torch.device("meta"):
        drafter = JakiroDrafter(config_for(settings, target))
    return sum(one.numel() for one in drafter.parameters() if one.requires_grad)


def _sized(arm: Arm, goal: int, target: TargetRecord) -> SizedArm:
    drafter = arm.settings.drafter
    before = drafter.bank.expert_width
    count = num_parameters(drafter, target)
    # The number of parameters is a straight line over the width.
    per_width = num_parameters(_with_width(drafter, before + 1), target) - count
    width = before + round((goal - count) / per_width)
    fitted = _with_width(drafter, max(width, 1))
    parameters = num_parameters(fitted, target)
    if width < 1 or abs(parameters / goal - 1) > TOLERANCE:
        raise ConfigError(
            f"the arm {arm.name} cannot be made as large as the base",
            expected=f"{goal:,} trainable parameters, give or take {TOLERANCE:.0%}",
            got=f"{parameters:,} with experts of width {max(width, 1)}",
            remedy="change less, or give the base wider experts",
        )
    settings = arm.settings.model_copy(update={"drafter": fitted})
    return SizedArm(replace(arm, settings=settings), parameters, before)


def _with_width(drafter: DrafterSettings, width: int) -> DrafterSettings:
    bank = drafter.bank.model_copy(update={"expert_width": width})
    return drafter.model_copy(update={"bank": bank})
