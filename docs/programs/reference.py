"""Program that generates `configs/base.yaml` and `docs/reference/config.md` for `make reference`.

The file describes every key of a training run with the docstring of its settings field, and the
page shows the file, so that the description of a key is written only once.
"""

import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from training.config import TrainSettings

ROOT = Path(__file__).parents[2]
BASE = ROOT / "configs" / "base.yaml"
CONFIG = ROOT / "docs" / "reference" / "config.md"
_WIDTH = 117  # largest number of characters in a line of comments
_HEADER = """\
Every setting of a training run, with its default. The file of a run contains `extends: base`, a
target, data, and the settings that differ from the defaults. On the command line,
`--set key.path=value` overrides a setting.

`make reference` generates this file from `TrainSettings` in `training/config.py` and the settings
classes that it contains. Change descriptions and defaults in these classes.
"""
_PAGE = """\
# Configuration

Unknown keys raise an error. A packaged file can be named without a path: `base` is this one.

```yaml
{}```
"""


def base_yaml() -> str:
    """Return `configs/base.yaml`."""
    header = "".join(f"# {line}".rstrip() + "\n" for line in _HEADER.splitlines())
    return header + "\n" + "\n".join(_yaml_lines(TrainSettings, "")) + "\n"


def config_page() -> str:
    """Return `docs/reference/config.md`."""
    return _PAGE.format(base_yaml())


def _yaml_lines(model: type[BaseModel], indent: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        below = _model_of(field)
        yield from _comment(_description(field), indent)
        if below is None:
            yield _yaml_line(name, field, indent)
        elif field.default is None:  # the group is left out
            yield f"{indent}{name}: null"
            yield from (f"{indent}# {line}" for line in _yaml_lines(below, "  "))
        else:
            yield f"{indent}{name}:"
            yield from _yaml_lines(below, f"{indent}  ")
        if not indent and below is not None:
            yield ""


def _yaml_line(name: str, field: FieldInfo, indent: str) -> str:
    if field.is_required():
        return f"{indent}# {name}:  (required in the file of a run)"
    return f"{indent}{name}: {_yaml_value(field.default)}"


def _comment(text: str, indent: str) -> Iterator[str]:
    for line in textwrap.wrap(text, _WIDTH - len(indent), break_on_hyphens=False):
        yield f"{indent}# {line}"


def _description(field: FieldInfo) -> str:
    text = " ".join((field.description or "").split())
    choices = [value for value in _choices(field.annotation) if value is not None]
    unsaid = [str(value) for value in choices if str(value) not in text]
    return f"{text} One of {', '.join(map(str, choices))}." if unsaid else text


def _choices(annotation: Any) -> Iterator[Any]:
    """Yield the values of a `Literal`, including one inside a union with None."""
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif get_origin(annotation) in (Union, UnionType):
        parts = [part for part in get_args(annotation) if part is not type(None)]
        if len(parts) == 1:
            yield from _choices(parts[0])


def _model_of(field: FieldInfo) -> type[BaseModel] | None:
    for part in (field.annotation, *get_args(field.annotation)):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return part
    return None


def _yaml_value(value: Any) -> str:
    simple = list(value) if isinstance(value, tuple) else value
    simple = str(simple) if isinstance(simple, Path) else simple
    return yaml.safe_dump(simple, default_flow_style=True).removesuffix("...\n").strip()


def main() -> None:
    """Write both files."""
    BASE.write_text(base_yaml(), encoding="utf-8")
    CONFIG.write_text(config_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
