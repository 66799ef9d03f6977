"""Arms of a study: a base and deltas on it, made equally large by the width of their experts."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from inference.benchmark.method_names import AUTOREGRESSIVE
from jakiro.config import DrafterSettings, config_for
from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError
from jakiro.target.record import TargetRecord
from jakiro.utils.settings import apply_overrides, merge, read_layered_yaml, validate_settings
from training.config import TrainSettings

BASE = "base"
# Settings that an arm may change. Data, order, steps and optimizer stay those of the base, and the
# expert width makes arms equally large.
_OPEN = (
    *("drafter", "initialize", "objective"),
    *("batch.anchors", "batch.curriculum_fraction", "batch.anchor_samples"),
)
_WIDTH = "drafter.experts.intermediate_size"


@dataclass(frozen=True)
class Arm:
    """A variant of the base: its name, its settings, and the file of its delta."""

    name: str
    settings: TrainSettings
    delta: Path | None = None  # None: the base itself


def read_arms(
    base: Path, deltas: Sequence[Path], overrides: Iterable[str] = (), max_steps: int | None = None
) -> list[Arm]:
    """Return the base and one arm for each delta.

    Args:
        base: YAML file of the base, the settings of a training run.
        deltas: YAML files of the settings that differ; the file's name is the arm's.
        overrides: `key.path=value`, merged into the base and so into every arm.
        max_steps: largest number of optimizer steps; None for those of the settings.

    Raises:
        ConfigError: a file is unusable, two arms have the same name, or a delta changes settings
            that all arms must share.
    """
    common = apply_overrides(read_layered_yaml(base), overrides)
    arms = [Arm(BASE, _settings(common, str(base), max_steps))]
    for path in deltas:
        delta = read_layered_yaml(path)
        _check_delta(delta, path)
        settings = _settings(merge(common, delta), str(path), max_steps)
        arms.append(Arm(path.stem, settings, path))
    _check_names(arms)
    return arms


def is_open(key: str) -> bool:
    """Return whether arms may differ in a setting, or are made equally large by it."""
    return key.startswith(_OPEN)


def _settings(values: Mapping[str, Any], source: str, max_steps: int | None) -> TrainSettings:
    settings = validate_settings(TrainSettings, values, source=source)
    if max_steps is None or settings.steps <= max_steps:
        return settings
    rate = settings.optimizer
    changes = {
        "steps": max_steps,
        "optimizer": rate.model_copy(update={"warmup_steps": min(rate.warmup_steps, max_steps)}),
    }
    return settings.model_copy(update=changes)


def _check_delta(delta: Mapping[str, Any], path: Path) -> None:
    keys = list(_dotted(delta))
    closed = [key for key in keys if key == _WIDTH or not is_open(key)]
    if closed or not keys:
        raise ConfigError(
            f"the ablation {path} changes what all arms must share",
            expected=f"settings below {', '.join(_OPEN)}, without {_WIDTH}: "
            "it is computed so that all arms have equally many parameters",
            got=", ".join(closed) or "nothing",
            remedy="put settings that all arms share into the base, or change them with --set",
        )


def _dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _check_names(arms: Sequence[Arm]) -> None:
    names = [AUTOREGRESSIVE, *(arm.name for arm in arms)]  # is measured beside the arms
    if odd := [name for name in names if not re.fullmatch(r"[\w.-]+", name)]:
        raise ConfigError(
            "the file name of an ablation cannot name an arm",
            expected="letters, digits, dots and hyphens",
            got=", ".join(odd),
            remedy="rename the file",
        )
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            "two arms have the same name",
            expected=f"files of different names, none of them {BASE} or {AUTOREGRESSIVE}",
            got=", ".join(repeated),
            remedy="rename a file",
        )


TOLERANCE = 0.02  # as a fraction of the base's number of parameters


@dataclass(frozen=True)
class SizedArm:
    """An arm whose expert width was changed to make the arm as large as the base."""

    arm: Arm
    parameters: int
    width_before: int  # as the base has it

    @property
    def name(self) -> str:
        """The arm's name."""
        return self.arm.name

    @property
    def width(self) -> int:
        """The inner width of an expert."""
        return self.arm.settings.drafter.experts.intermediate_size


def equally_sized(arms: Sequence[Arm], target: TargetRecord) -> list[SizedArm]:
    """Return the arms with as many trainable parameters as the first arm.

    Args:
        arms: the base and the other arms.
        target: record of the target.

    Raises:
        ConfigError: no expert width brings an arm within 2% of the base's size.
    """
    goal = num_parameters(arms[0].settings.drafter, target)
    return [_sized(arm, goal, target) for arm in arms]


def num_parameters(settings: DrafterSettings, target: TargetRecord) -> int:
    """Return the number of trainable parameters of a drafter, without allocating them.

    Args:
        settings: settings of the drafter.
        target: record of the target.
    """
    with torch.device("meta"):
        drafter = JakiroDrafter(config_for(settings, target))
    return sum(part.numel() for part in drafter.parameters() if part.requires_grad)


def _sized(arm: Arm, goal: int, target: TargetRecord) -> SizedArm:
    drafter = arm.settings.drafter
    before = drafter.experts.intermediate_size
    count = num_parameters(drafter, target)
    # The number of parameters is linear in the width.
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
    experts = drafter.experts.model_copy(update={"intermediate_size": width})
    return drafter.model_copy(update={"experts": experts})
