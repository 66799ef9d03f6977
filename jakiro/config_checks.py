"""Checks of a drafter's config, and of the target states that it reads."""

from collections.abc import Mapping, Sequence
from typing import Any

from jakiro.errors import ConfigError
from jakiro.target.cache import StateSource
from jakiro.target.record import TargetRecord


def check_source(name: str, source: StateSource, target: TargetRecord) -> None:
    """Raise an error unless the target has all layers that are read.

    Args:
        name: setting that names the layers.
        source: layers to read, and the kind of state.
        target: record of the target.

    Raises:
        ConfigError: the target lacks a layer, or there are no layers.
    """
    count = len(target.kv_widths) if source.kind == "kv" else target.num_hidden_states or 0
    if not source.layers or any(not 0 <= layer < count for layer in source.layers):
        raise ConfigError(
            f"drafter.{name} is empty or names layers that the target does not have",
            expected=f"one or more indices from 0 to {count - 1}",
            got=list(source.layers),
        )


def check_widths(widths: Sequence[int]) -> None:
    """Raise an error unless the states of all layers that are read have the same width.

    Args:
        widths: width of each layer's state.

    Raises:
        ConfigError: the widths differ.
    """
    if len(found := set(widths)) > 1:
        raise ConfigError(
            "the target's layers differ in the width of their keys and values",
            expected="memory layers of the same width, or a common width to project them to",
            got=sorted(found),
            remedy="set drafter.memory.common_width, or choose drafter.memory.layers that all have "
            "the same width",
        )


def check_rotation(target: TargetRecord) -> None:
    """Raise an error unless the rotation of the target's keys is known.

    Args:
        target: record of the target.

    Raises:
        ConfigError: the rotation is not known.
    """
    if target.key_rotation is None:
        raise ConfigError(
            "the rotation of the target's keys cannot be undone",
            expected="a target that rotates whole keys of all layers in the same way",
            got=target.name_or_path,
            remedy="set drafter.memory.rotated=true",
        )


def unusable(lack: str, expected: str, got: type) -> ConfigError:
    """Return the error for a `config.json` that no drafter can be built from.

    Args:
        lack: end of the message, such as "no settings".
        expected: the expected content.
        got: type of the content; `NoneType` if there is none.
    """
    return ConfigError(
        f"the drafter config has {lack}",
        expected=expected,
        got="none" if got is type(None) else got.__name__,
        remedy="use the config.json that was saved with the weights",
    )


def check_complete(record: Mapping[str, Any]) -> None:
    """Raise an error unless the record of a target has all required fields.

    Args:
        record: fields of `TargetRecord`.

    Raises:
        ConfigError: a field is missing.
    """
    fields = TargetRecord.model_fields.items()
    missing = [name for name, field in fields if field.is_required() and name not in record]
    if missing:
        raise ConfigError(
            "the drafter config's record of its target is incomplete",
            expected=f"a record with the fields {', '.join(missing)}",
            got="a record without these fields",
            remedy="train the drafter again with this version of jakiro",
        )
