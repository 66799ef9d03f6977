"""Settings: typed, frozen, strict about their keys, and read from layered YAML."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from jakiro.errors import ConfigError
from jakiro.yaml_layers import apply_overrides, read_layered_yaml

Location = Sequence[int | str]


class Settings(BaseModel):
    """Base of every group of settings: it cannot change, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


SettingsT = TypeVar("SettingsT", bound=Settings)


def load_settings(cls: type[SettingsT], path: Path, overrides: Iterable[str] = ()) -> SettingsT:
    """Read settings from a YAML file, lay the overrides over them, and validate the result.

    Args:
        cls: the settings to build.
        path: a YAML file; its key `extends` names another one, relative to it, to lay below.
        overrides: `key.path=value`, the value in YAML; later ones win.

    Raises:
        ConfigError: a file or an override is unreadable, a key unknown, or a value does not fit.
    """
    values = apply_overrides(read_layered_yaml(path), overrides)
    return validate_settings(cls, values, source=str(path))


def validate_settings(cls: type[SettingsT], values: Mapping[str, Any], *, source: str) -> SettingsT:
    """Build settings from plain values.

    Args:
        cls: the settings to build.
        values: nested mappings, as read from YAML or JSON.
        source: where the values come from, for the error message.

    Raises:
        ConfigError: a key is unknown or missing, or a value does not fit.
    """
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        raise _explain(cls, error, source) from error


def dump_settings(settings: Settings) -> str:
    """Return the settings as YAML that `load_settings` reads back to equal ones."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the innermost values of nested mappings under names such as `drafter.trunk.kind`."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _explain(cls: type[Settings], error: ValidationError, source: str) -> ConfigError:
    """Say what is wrong in the caller's terms; an unknown key first, for it may cause the rest."""
    problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    first = problems[0]
    others = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    if first["type"] == "extra_forbidden":
        return _unknown_key(cls, first, source, others)
    expected = first["msg"].removeprefix("Value error, ")
    key = _dotted(first["loc"])
    if not key:  # a check across keys says in its message what it met
        message = f"{source} has settings that do not fit together"
        return ConfigError(message, expected=expected, remedy="change one of them")
    return ConfigError(
        f"{source} has an unusable value for {key!r}{others}",
        expected=expected,
        got="nothing" if first["type"] == "missing" else repr(first["input"]),
        remedy=f"set {key!r} to such a value",
    )


def _unknown_key(
    cls: type[Settings], problem: ErrorDetails, source: str, others: str
) -> ConfigError:
    *parents, key = problem["loc"]
    known = sorted(_known_keys(cls, parents))
    close = get_close_matches(str(key), known, n=1)
    return ConfigError(
        f"{source} has the unknown key {_dotted(problem['loc'])!r}{others}",
        expected="one of " + ", ".join(known),
        got=key,
        remedy=f"did you mean {_dotted([*parents, close[0]])!r}?" if close else "remove the key",
    )


def _known_keys(cls: type[BaseModel], parents: Location) -> set[str]:
    models: set[type[BaseModel]] = {cls}
    for part in parents:
        below = {
            child
            for model in models
            if part in model.model_fields
            for child in _models_in(model.model_fields[str(part)].annotation)
        }
        models = below or models  # an index or the tag of a union leads no deeper
    return {name for model in models for name in model.model_fields}


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _dotted(location: Location) -> str:
    return ".".join(map(str, location))
