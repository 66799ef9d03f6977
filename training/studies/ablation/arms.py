"""Arms of a study: a base and its variants, with expert widths that make them equally large."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from inference.benchmark.method_names import AUTOREGRESSIVE
from jakiro.config import JakiroConfig, config_for
from jakiro.drafter import JakiroDrafter
from jakiro.drafter_settings import DrafterSettings
from jakiro.errors import ConfigError
from jakiro.target.record import TargetRecord
from jakiro.utils.settings import (
    apply_overrides,
    flattened,
    merge,
    read_layered_yaml,
    validate_settings,
)
from training.config import TrainSettings

BASE = "base"
# Settings that an arm may change. The data, their order, the number of steps and the optimizer are
# the same as in the base, and the expert width is computed so that all arms are equally large.
_OPEN = (
    *("drafter", "initialize", "objective"),
    *("batch.anchors", "batch.far_anchors", "batch.curriculum_fraction", "batch.anchor_samples"),
)
_WIDTH = "drafter.experts.intermediate_size"


@dataclass(frozen=True)
class Arm:
    """The base or a variant of it."""

    name: str
    settings: TrainSettings


def read_arms(
    base: Path, deltas: Sequence[Path], overrides: Iterable[str] = (), max_steps: int | None = None
) -> list[Arm]:
    """Return the base and one arm for each delta.

    Args:
        max_steps: largest number of optimizer steps, which also replaces a number of epochs; None
            for the number in the settings.
    """
    common = apply_overrides(read_layered_yaml(base), overrides)
    arms = [Arm(BASE, _settings(common, str(base), max_steps))]
    for path in deltas:
        delta = read_layered_yaml(path)
        _check_delta(delta, path)
        settings = _settings(merge(common, delta), str(path), max_steps)
        if settings == arms[0].settings:
            raise ConfigError(
                f"the ablation {path} changes nothing",
                expected="settings that differ from the base's",
                got=f"the settings that {base} has already",
                remedy="leave it out, or use another base",
            )
        arms.append(Arm(path.stem, settings))
    names = [AUTOREGRESSIVE, *(arm.name for arm in arms)]
    if len(set(names)) < len(names) or any(re.search(r"[^\w.-]", name) for name in names):
        raise ConfigError(
            f"the files of the ablations need different names, none of which is {BASE} or "
            f"{AUTOREGRESSIVE}, of letters, digits, underscores, dots and hyphens",
            got=", ".join(names[1:]),
        )
    return arms


def _settings(values: Mapping[str, Any], source: str, max_steps: int | None) -> TrainSettings:
    settings = validate_settings(TrainSettings, values, source=source)
    if max_steps is None or (settings.steps is not None and settings.steps <= max_steps):
        return settings
    changes: dict[str, Any] = {"steps": max_steps, "epochs": None}
    rate = settings.optimizer
    if rate.warmup_for(max_steps) > max_steps:
        changes["optimizer"] = rate.model_copy(update={"warmup_steps": max_steps})
    return settings.model_copy(update=changes)


def _check_delta(delta: Mapping[str, Any], path: Path) -> None:
    keys = [key for key, _ in flattened(delta)]
    closed = [key for key in keys if key == _WIDTH or not key.startswith(_OPEN)]
    if closed or not keys:
        raise ConfigError(
            f"the ablation {path} cannot be compared with the base",
            expected=f"one or more of these settings, or of those below them: {', '.join(_OPEN)}; "
            f"except {_WIDTH}, which is computed so that all arms have equally many parameters",
            got=", ".join(closed) or "nothing",
            remedy="put settings that all arms share into the base, or change them with --set",
        )


TOLERANCE = 0.02  # largest difference in size, as a fraction of the base's number of parameters


@dataclass(frozen=True)
class SizedArm:
    """An arm with an expert width that makes the arm as large as the base."""

    arm: Arm
    parameters: int
    width_before: int  # expert width in the arm's settings, before the change

    @property
    def name(self) -> str:
        """The arm's name."""
        return self.arm.name

    @property
    def width(self) -> int:
        """The intermediate size of an expert."""
        return self.arm.settings.drafter.experts.intermediate_size


def equally_sized(
    arms: Sequence[Arm],
    target: TargetRecord,
    *,
    any_size: bool = False,
    base_config: JakiroConfig | None = None,
) -> list[SizedArm]:
    """Return the arms, with expert widths that make them about as large as the first arm.

    If only some experts run for a token, only as many are counted. The nodes of one pass may
    choose different experts, so such an arm still drafts more slowly than the base.

    Args:
        any_size: whether an arm that no expert width makes as large as the base keeps the width in
            its settings, and thus a size of its own.
        base_config: config of the base's drafter, with the size of the draft vocabulary that the
            data gave it, which other arms get with the same setting; None if the data is unknown,
            to compute with the largest sizes that the settings allow.

    Raises:
        ConfigError: no expert width brings an arm within 2% of the base's size, and not `any_size`.
    """
    size = arms[0].settings.drafter.draft_vocab_size
    if base_config is not None:
        size = base_config.draft_vocab_size
    known = [_with_vocabulary(arm, size) if _shares(arm, arms[0]) else arm for arm in arms]
    goal = num_active_parameters(known[0].settings.drafter, target)
    found = [_sized(arm, goal, target, any_size) for arm in known]
    return [
        replace(own, arm=_with_vocabulary(own.arm, arm.settings.drafter.draft_vocab_size))
        for own, arm in zip(found, arms, strict=True)
    ]


def _shares(arm: Arm, base: Arm) -> bool:
    """Return whether the data gives an arm the draft vocabulary of the base."""
    return _vocabulary(arm) == _vocabulary(base)


def _vocabulary(arm: Arm) -> tuple[int | str | None, str | None]:
    return arm.settings.drafter.draft_vocab_size, arm.settings.initialize.drafter


def _with_vocabulary(arm: Arm, size: int | Literal["auto"] | None) -> Arm:
    drafter = arm.settings.drafter.model_copy(update={"draft_vocab_size": size})
    return replace(arm, settings=arm.settings.model_copy(update={"drafter": drafter}))


def num_parameters(settings: DrafterSettings, target: TargetRecord) -> int:
    """Return the number of trainable parameters of a drafter, without allocating them."""
    with torch.device("meta"):
        drafter = JakiroDrafter(config_for(settings, target))
    return sum(part.numel() for part in drafter.parameters() if part.requires_grad)


def num_active_parameters(settings: DrafterSettings, target: TargetRecord) -> int:
    """Return the number of trainable parameters that a drafter computes with for one token."""
    changes = {"num_experts": settings.experts.num_active, "active_experts": None}
    experts = settings.experts.model_copy(update=changes)
    return num_parameters(settings.model_copy(update={"experts": experts}), target)


def _sized(arm: Arm, goal: int, target: TargetRecord, any_size: bool) -> SizedArm:
    drafter = arm.settings.drafter
    before = drafter.experts.intermediate_size
    count = num_active_parameters(drafter, target)
    # The number of parameters is linear in the width, and constant if there are no experts.
    per_width = num_active_parameters(_with_width(drafter, before + 1), target) - count
    width = before + round((goal - count) / max(per_width, 1))
    fitted = _with_width(drafter, max(width, 1))
    parameters = num_active_parameters(fitted, target)
    if width < 1 or abs(parameters / goal - 1) > TOLERANCE:
        if any_size:
            return SizedArm(arm, num_parameters(drafter, target), before)
        raise ConfigError(
            f"the arm {arm.name} cannot be made as large as the base",
            expected=f"{goal:,} trainable parameters, plus or minus {TOLERANCE:.0%}",
            got=f"{parameters:,} with experts of width {max(width, 1)}",
            remedy="change fewer settings in this arm, set a larger expert width in the base, or "
            "compare arms of different sizes with --any-size",
        )
    settings = arm.settings.model_copy(update={"drafter": fitted})
    return SizedArm(replace(arm, settings=settings), num_parameters(fitted, target), before)


def _with_width(drafter: DrafterSettings, width: int) -> DrafterSettings:
    experts = drafter.experts.model_copy(update={"intermediate_size": width})
    return drafter.model_copy(update={"experts": experts})
