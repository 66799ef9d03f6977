"""YAML files that extend one another, and overrides that come on top."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from jakiro.errors import ConfigError

_BASE_KEY = "extends"


class _Loader(yaml.SafeLoader):
    """YAML in which a repeated key is an error, not the silent loss of its first value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value!r} stands here twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def read_layered_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file, laid over the file that its `extends` key names.

    The base's path is relative to the file that names it. Mappings are merged key by key; any
    other value replaces the one below it.

    Raises:
        ConfigError: a file is missing, unreadable, no YAML mapping, or extends itself.
    """
    return _read_layers(path, ())


def apply_overrides(layers: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return a copy of the mapping with each override laid over it, in order.

    Args:
        layers: nested mappings.
        overrides: `key.path=value`, the value in YAML, such as `trunk.num_layers=2`.

    Raises:
        ConfigError: an override has no key or no `=`, or its value is no YAML.
    """
    merged = dict(layers)
    for override in overrides:
        merged = merge(merged, _parse_override(override))
    return merged


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return both mappings as one; where both have a value that is no mapping, `above` wins."""
    merged = dict(below)
    for key, value in above.items():
        base = merged.get(key)
        if isinstance(base, Mapping) and isinstance(value, Mapping):
            merged[key] = merge(base, value)
        else:
            merged[key] = value
    return merged


def _read_layers(path: Path, extending: tuple[Path, ...]) -> dict[str, Any]:
    chain = (*extending, path.resolve())
    if chain[-1] in extending:
        raise ConfigError(
            f"{path} extends itself",
            expected="a chain of files that ends",
            got=" -> ".join(map(str, chain)),
            remedy=f"remove `{_BASE_KEY}` from one of them",
        )
    layer = _read_mapping(path, extending)
    base = layer.pop(_BASE_KEY, None)
    if base is None:
        return layer
    if not isinstance(base, str):
        raise ConfigError(
            f"`{_BASE_KEY}` in {path} is no path",
            expected="one path",
            got=base,
            remedy="let the files extend one another in a chain",
        )
    return merge(_read_layers(path.parent / base, chain), layer)


def _read_mapping(path: Path, extending: tuple[Path, ...]) -> dict[str, Any]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        named_by = f", which {extending[-1]} extends" if extending else ""
        raise ConfigError(
            f"cannot read the settings file {path}{named_by}",
            expected="a readable YAML file",
            got=error.strerror or error,
            remedy="check the path",
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is not YAML", expected="valid YAML", got=error, remedy="correct that place"
        ) from error
    return _require_mapping({} if content is None else content, path)


def _require_mapping(content: object, path: Path) -> dict[str, Any]:
    if isinstance(content, dict) and all(isinstance(key, str) for key in content):
        return content
    raise ConfigError(
        f"{path} holds no settings",
        expected="a mapping whose keys are text",
        got=type(content).__name__,
        remedy="write `key: value` lines",
    )


def _parse_override(override: str) -> dict[str, Any]:
    dotted, separator, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not separator or not all(keys):
        raise ConfigError(
            "an override is malformed",
            expected="key.path=value",
            got=repr(override),
            remedy="write it as in trunk.num_layers=2",
        )
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"the value of the override {dotted.strip()!r} is not YAML",
            expected="a value as in a settings file",
            got=repr(text),
            remedy="quote the value",
        ) from error
    for key in reversed(keys):
        value = {key: value}
    return value
