"""Sweeps over the values of a setting, such as the learning rate, for every arm separately."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import Field

from jakiro.errors import ConfigError
from jakiro.utils.settings import Settings, flattened, merge, validate_settings
from training.config import TrainSettings
from training.loop.run_fingerprint import LENGTH
from training.studies.ablation.arms import SizedArm, is_open

# Settings that cannot be swept: all arms must share them, or the study sets them itself.
_FIXED = ("data.", "evaluation.", "checkpoint.", *LENGTH, "seed", "log_every")


class Sweep(Settings):
    """A setting and the values to try.

    Attributes:
        key: dotted name of the setting, such as `optimizer.learning_rate`.
        values: values in the given order.
    """

    key: str
    values: tuple[float, ...] = Field(min_length=2)

    def applied(self, sized: SizedArm, value: float) -> SizedArm:
        """Return an arm of the same size with a new value of the setting.

        Args:
            sized: arm to be changed.
            value: new value of the setting.

        Raises:
            ConfigError: the value does not fit the arm's other settings.
        """
        settings = sized.arm.settings.model_dump()
        delta: Any = int(value) if value.is_integer() and self._is_whole(settings) else value
        for part in reversed(self.key.split(".")):
            delta = {part: delta}
        source = f"--sweep {self.key}={value_name(value)}"
        changed = validate_settings(TrainSettings, merge(settings, delta), source=source)
        return replace(sized, arm=replace(sized.arm, settings=changed))

    def _is_whole(self, settings: Mapping[str, Any]) -> bool:
        return isinstance(_numbers(settings)[self.key], int)


def parse_sweep(text: str, arms: Sequence[SizedArm]) -> Sweep:
    """Return the sweep that a user specified as `key.path=VALUE,VALUE,...`.

    Args:
        text: the user's text.
        arms: arms of the study, which must accept every value.

    Raises:
        ConfigError: the text is malformed, the setting is not a number or may not be swept, or an
            arm does not accept a value.
    """
    key, _, listed = text.partition("=")
    known = _numbers(arms[0].arm.settings.model_dump())
    allowed = [name for name in known if not is_open(name) and not name.startswith(_FIXED)]
    if key not in allowed:
        raise ConfigError(
            f"--sweep {text} cannot be used",
            expected="a numeric setting that neither arms nor seeds change: "
            f"one of {', '.join(allowed)}",
            got=key,
            remedy="sweep one of these settings; change settings that all arms share with --set",
        )
    sweep = Sweep(key=key, values=_parsed(listed, text))
    for sized in arms:
        for value in sweep.values:
            sweep.applied(sized, value)
    return sweep


def value_name(value: float) -> str:
    """Return the shortest text of a value, such as `0.02`."""
    return repr(int(value)) if value.is_integer() else repr(value)


def _parsed(listed: str, text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in listed.split(","))
    except ValueError:
        values = ()
    if len(values) < 2 or len(set(values)) < len(values) or not all(map(math.isfinite, values)):
        raise ConfigError(
            f"--sweep {text} cannot be used",
            expected="key.path=VALUE,VALUE,... with two or more different numbers",
            got=listed or "no value",
        )
    return values


def _numbers(settings: Mapping[str, Any]) -> dict[str, int | float]:
    """Return the values of all settings that are numbers, by their dotted names."""
    return {
        name: value
        for name, value in flattened(settings)
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
