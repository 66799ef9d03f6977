"""The arms of a study: one base, and small files that each change one thing about it."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference.comparison.method_names import PLAIN
from jakiro.errors import ConfigError
from jakiro.settings import validate_settings
from jakiro.yaml_layers import apply_overrides, merge, read_layered_yaml
from training.config import TrainSettings

BASE = "base"
# What an arm may change. Data, order, steps and optimizer stay those of the base, and the expert
# width is what makes arms equally large.
_OPEN = (
    *("drafter", "initialize", "objective"),
    *("batch.anchors", "batch.curriculum", "batch.draws"),
)
_WIDTH = "drafter.bank.expert_width"


@dataclass(frozen=True)
class Arm:
    """One variant: its name, its settings, and the file that says what it changes."""

    name: str
    settings: TrainSettings
    delta: Path | None = None  # None: the base itself


def read_arms(
    base: Path, deltas: Sequence[Path], overrides: Iterable[str] = (), max_steps: int | None = None
) -> list[Arm]:
    """Return the base and one arm for each delta.

    Args:
        base: settings of a training run.
        deltas: files with the settings that differ; the file's name is the arm's.
        overrides: `key.path=value`, laid over the base, and so part of every arm.
        max_steps: cut the runs to so many steps.

    Raises:
        ConfigError: a file is unusable, two arms have one name, or a delta changes what all arms
            must share.
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
    """Whether arms may differ in a setting, or are made equally large by it."""
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
            "it is set so that all arms have equally many parameters",
            got=", ".join(closed) or "nothing",
            remedy="put what all arms share into the base, or give it with --set",
        )


def _dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _check_names(arms: Sequence[Arm]) -> None:
    names = [PLAIN, *(arm.name for arm in arms)]  # is measured beside them
    if odd := [name for name in names if not re.fullmatch(r"[\w.-]+", name)]:
        raise ConfigError(
            "the file of an ablation cannot name an arm",
            expected="letters, digits, dots and hyphens",
            got=", ".join(odd),
            remedy="rename the file",
        )
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            "two arms have one name",
            expected=f"files of different names, none of them {BASE} or {PLAIN}",
            got=", ".join(repeated),
            remedy="rename a file",
        )
