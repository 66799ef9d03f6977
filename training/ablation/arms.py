"""Arms of a study: a base and its variants, with expert widths that make them equally large."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from inference.benchmark.settings import AUTOREGRESSIVE
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


TOLERANCE = 0.02  # largest difference in size, as a fraction of the base's number of parameters


@dataclass(frozen=True)
class Arm:
    """The base or a variant of it.

    Attributes:
        parameters: number of trainable parameters; 0 until the arm has its expert width.
        width_before: expert width in the arm's settings, before it was changed.
    """

    name: str
    settings: TrainSettings
    parameters: int = 0
    width_before: int = 0

    @property
    def width(self) -> int:
        return self.settings.drafter.experts.intermediate_size


def read_arms(
    base: Path, deltas: Sequence[Path], overrides: Iterable[str] = (), max_steps: int | None = None
) -> list[Arm]:
    """Return the base and one arm for each delta."""
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
    changes: dict[str, Any] = {"steps": max_steps}
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


def equalize_sizes(
    arms: Sequence[Arm],
    target: TargetRecord,
    *,
    any_size: bool = False,
    base_config: JakiroConfig | None = None,
) -> list[Arm]:
    """Return the arms, with expert widths that make them about as large as the first arm.

    If only some experts run for a token, only as many are counted. The nodes of one pass may
    choose different experts, so such an arm still drafts more slowly than the base.

    Args:
        any_size: whether an arm that no expert width makes as large as the base keeps the width in
            its settings, and thus a size of its own.
        base_config: config of the base's drafter, with the size of the draft vocabulary that the
            data gave it, which other arms get with the same setting; None if the data is unknown,
            to compute with the largest sizes that the settings allow.
    """
    drafters = [arm.settings.drafter for arm in arms]
    if base_config is not None:
        size = {"draft_vocab_size": base_config.draft_vocab_size}
        of_data = _vocabulary(arms[0])
        drafters = [
            arm.settings.drafter.model_copy(update=size if _vocabulary(arm) == of_data else {})
            for arm in arms
        ]
    goal = num_active_parameters(drafters[0], target)
    return [
        _fit_size(arm, drafter, goal, target, any_size)
        for arm, drafter in zip(arms, drafters, strict=True)
    ]


def _vocabulary(arm: Arm) -> tuple[int | str | None, str | None]:
    """Return the settings that determine which draft vocabulary the data gives an arm."""
    return arm.settings.drafter.draft_vocab_size, arm.settings.initialize.drafter


def num_parameters(settings: DrafterSettings, target: TargetRecord) -> int:
    """Return the number of trainable parameters of a drafter, without allocating them."""
    with torch.device("meta"):
        drafter = JakiroDrafter(config_for(settings, target))
    return sum(part.numel() for part in drafter.parameters() if part.requires_grad)


def num_active_parameters(settings: DrafterSettings, target: TargetRecord) -> int:
    """Return the number of trainable parameters that a drafter computes with for one token."""
    active = settings.experts.num_active
    return num_parameters(_with_experts(settings, num_experts=active, active_experts=None), target)


def _fit_size(
    arm: Arm, drafter: DrafterSettings, goal: int, target: TargetRecord, any_size: bool
) -> Arm:
    """Return an arm with a fitting expert width."""
    count = num_active_parameters(drafter, target)
    # The number of parameters is linear in the width, and constant if there are no experts.
    wider = _with_experts(drafter, intermediate_size=arm.width + 1)
    per_width = num_active_parameters(wider, target) - count
    width = max(arm.width + round((goal - count) / max(per_width, 1)), 1)
    fitted = _with_experts(drafter, intermediate_size=width)
    parameters = num_active_parameters(fitted, target)
    if abs(parameters / goal - 1) > TOLERANCE:
        if not any_size:
            raise ConfigError(
                f"the arm {arm.name} cannot be made as large as the base",
                expected=f"{goal:,} trainable parameters, plus or minus {TOLERANCE:.0%}",
                got=f"{parameters:,} with experts of width {width}",
                remedy="change fewer settings in this arm, set a larger expert width in the base, "
                "or compare arms of different sizes with --any-size",
            )
        fitted, width = drafter, arm.width
    changed = _with_experts(arm.settings.drafter, intermediate_size=width)
    return replace(
        arm,
        settings=arm.settings.model_copy(update={"drafter": changed}),
        parameters=num_parameters(fitted, target),
        width_before=arm.width,
    )


def _with_experts(drafter: DrafterSettings, **changes: int | None) -> DrafterSettings:
    experts = drafter.experts.model_copy(update=changes)
    return drafter.model_copy(update={"experts": experts})
