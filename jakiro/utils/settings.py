"""Typed, frozen settings with a fixed set of keys, read from YAML files that extend each other."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from jakiro.errors import ConfigError
from jakiro.utils.packaged import config_names, config_path

_BASE_KEY = "extends"
_SHOWN = 200  # largest number of characters of a value that an error shows


class _Loader(yaml.SafeLoader):
    """YAML loader that rejects repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value!r} is repeated here", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def _shorten(value: object) -> str:
    """Return the beginning of a value's representation."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def read_layered_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file, merged over the mapping of the file that it extends.

    The value of the key `extends` is the path of the extended file, relative to the file that
    contains the key, or the name of a packaged configuration, such as `base`. Mappings are merged
    key by key; any other value replaces the value in the extended file.
    """
    path = config_path(path)
    layer = _read_mapping(path)
    base = layer.pop(_BASE_KEY, None)
    if base is None:
        return layer
    named = config_path(Path(base))
    extended = path.parent / base if named == Path(base) else named
    return merge(read_layered_yaml(extended), layer)


def apply_overrides(layers: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return a copy of a mapping with overrides, such as `batch.micro_batch_size=2`."""
    merged = dict(layers)
    for override in overrides:
        merged = merge(merged, _parse_override(override))
    return merged


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mapping of default values `below` with those of `above`, merged key by key."""
    merged = dict(below)
    for key, value in above.items():
        base = merged.get(key)
        if isinstance(base, Mapping) and isinstance(value, Mapping):
            merged[key] = merge(base, value)
        else:
            merged[key] = value
    return merged


def _read_mapping(path: Path) -> dict[str, Any]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader) or {}
    except OSError as error:
        ends = (f"{path.parent.name}/{path.stem}", path.stem)
        close = [name for end in ends for name in get_close_matches(end, config_names(), n=1)]
        raise ConfigError(
            f"cannot read the settings file {path}",
            got=error.strerror or error,
            remedy="check the path, or name a packaged configuration without a suffix, such as "
            + [*close, "base"][0],
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML", got=error) from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path} contains no settings",
            expected="lines of the form `key: value`",
            got=type(content).__name__,
        )
    return content


def _parse_override(override: str) -> dict[str, Any]:
    dotted, separator, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not separator or not all(keys):
        raise ConfigError(
            "an override is malformed",
            expected="KEY.PATH=VALUE, such as batch.micro_batch_size=2",
            got=repr(override),
        )
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"the value of the override {dotted.strip()!r} is not YAML",
            got=_shorten(text),
            remedy="put the value in quotes",
        ) from error
    for key in reversed(keys):
        value = {key: value}
    return value


class Settings(BaseModel):
    """Base class of settings: values cannot be changed, and unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True
    )


def innermost_types(annotation: Any) -> Iterator[Any]:
    """Yield the types inside an annotation such as `tuple[int, ...] | None`."""
    if arguments := get_args(annotation):
        for argument in arguments:
            yield from innermost_types(argument)
    else:
        yield annotation


SettingsT = TypeVar("SettingsT", bound=Settings)


def load_settings(
    settings_class: type[SettingsT], path: Path, overrides: Iterable[str] = ()
) -> SettingsT:
    """Read settings from a YAML file, apply the overrides, and validate the result."""
    values = apply_overrides(read_layered_yaml(path), overrides)
    return validate_settings(settings_class, values, source=str(path))


def validate_settings(
    settings_class: type[SettingsT],
    values: Mapping[str, Any],
    *,
    source: str,
    name_of: Callable[[str], str] = str,
) -> SettingsT:
    """Build settings from nested mappings, as read from YAML or JSON.

    Errors name the source of the values, and call a dotted key `name_of(key)`.
    """
    try:
        return settings_class.model_validate(values)
    except ValidationError as error:
        raise _explain(settings_class, error, source, name_of) from error


def dump_settings(settings: Settings) -> str:
    """Return the settings as YAML, from which `load_settings` restores equal settings."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False)


def flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the innermost values of nested mappings with names such as `drafter.trunk.kind`."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _explain(
    settings_class: type[Settings],
    error: ValidationError,
    source: str,
    name_of: Callable[[str], str],
) -> ConfigError:
    """Return an error that describes one of the problems, with keys as the caller knows them.

    An unknown key takes precedence, because it may have caused the other problems.
    """
    problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    first = problems[0]
    # Each kind of value that a key may have gives a problem of its own.
    count = len({(problem["loc"][:-1], str(problem["input"])) for problem in problems})
    others = f" (and {count - 1} more)" if count > 1 else ""
    if first["type"] == "extra_forbidden":
        return _unknown_key(settings_class, first, source, others)
    expected = first["msg"].removeprefix("Value error, ")
    key = name_of(".".join(map(str, first["loc"]))) if first["loc"] else ""
    if not key:  # the problem concerns several keys, which the message names
        message = f"{source} has settings that do not fit together"
        return ConfigError(message, expected=expected, remedy="change one of these settings")
    return ConfigError(
        f"{source} has an unusable value for {key!r}{others}",
        expected=expected,
        got="no value" if first["type"] == "missing" else _shorten(first["input"]),
        remedy=f"set {key!r} to a valid value",
    )


def _unknown_key(
    settings_class: type[Settings], problem: ErrorDetails, source: str, others: str
) -> ConfigError:
    parents = [part for part in problem["loc"][:-1] if isinstance(part, str)]  # without indices
    key = ".".join([*parents, str(problem["loc"][-1])])
    siblings = [name for name in _keys(settings_class) if name.split(".")[:-1] == parents]
    close = get_close_matches(key, siblings, n=1)
    return ConfigError(
        f"{source} has the unknown key {key!r}{others}",
        expected="one of " + ", ".join(sorted(siblings)),
        remedy=f"did you mean {close[0]!r}?" if close else "remove the key",
    )


def _keys(settings_class: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all keys, including those of settings inside other settings."""
    for name, field in settings_class.model_fields.items():
        yield f"{prefix}{name}"
        for kind in innermost_types(field.annotation):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _keys(kind, f"{prefix}{name}.")
