"""Options of commands: those of settings classes, and those that several commands share."""

import inspect
import re
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_origin

import typer
from pydantic.fields import FieldInfo

from jakiro.utils.settings import Settings, innermost_types, validate_settings

# Options that are not named after their field, and one whose name in the singular ends with s.
_FLAGS = {
    **{"overrides": "--set", "json_file": "--json"},
    **{"trees": "--trees", "corpus": "--corpus"},
}
_VALUES: dict[object, str] = {int: "N", float: "X", bool: "yes|no", Path: "FILE"}
_VALUES_OF = {
    **dict.fromkeys(("target", "tokenizer"), "PATH_OR_HUB_ID"),
    **dict.fromkeys(("data", "corpus"), "PATH"),
    **{"prompts": "FILE", "system": "TEXT", "device_memory": "GIB"},
    **{"overrides": "KEY.PATH=VALUE", "train_only": "ARM"},
}
_LONG = 32  # number of characters from which values are named in the help text only

DRAFTERS = (
    "aded, aded=TABLE, lookup, lm=MODEL (a smaller model with the same tokenizer), or two "
    "drafters that share trees, such as aded+drafter=DRAFTER"
)
DrafterName = Annotated[
    str,
    typer.Argument(
        metavar="DRAFTER",
        help="Folder or hub id of a drafter, or smollm2-135m-instruct for the drafter in this "
        f"package; or, with --target, {DRAFTERS}.",
        show_default=False,
    ),
]
DrafterOption = Annotated[
    str,
    typer.Option(
        "--drafter",
        metavar="DRAFTER",
        help=f"Folder or hub id of a drafter; or, with --target, {DRAFTERS}.",
    ),
]


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each field of the settings that are its parameters.

    Default and help text are those of the field, which also checks the value. A field with a
    default factory has no option. A field with several values has one that may be repeated.
    """
    parameters = inspect.signature(command, eval_str=True).parameters
    classes: dict[str, type[Settings]] = {
        name: parameter.annotation
        for name, parameter in parameters.items()
        if isinstance(parameter.annotation, type) and issubclass(parameter.annotation, Settings)
    }

    @wraps(command)
    def run(**given: Any) -> None:
        settings = {name: _settings(fields_of, given) for name, fields_of in classes.items()}
        command(**given, **settings)

    options: list[inspect.Parameter] = []
    for name, parameter in parameters.items():
        options += _options(classes[name]) if name in classes else [parameter]
    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in options}
    return run


def _options(settings_class: type[Settings]) -> Iterator[inspect.Parameter]:
    panel = (settings_class.__doc__ or "Options").partition("\n")[0].rstrip(".")
    for name, field in _fields(settings_class).items():
        default: Any = inspect.Parameter.empty if field.is_required() else field.default
        kind: Any = field.annotation if field.annotation is bool else str
        text = " ".join((field.description or "").split())
        values = ", ".join(map(str, default)) if isinstance(default, tuple) else ""
        if _is_list(field):
            kind, text = list[str], f"{text} May be repeated."
            default = default if field.is_required() else None
        option = typer.Option(
            *([] if default is True else [_flag(name, field)]),  # else it has a flag that says no
            metavar=None if kind is bool else _value_name(name, field),
            help=text,
            show_default=values or True,
            rich_help_panel=panel,
        )
        kind = kind | None if default is None else kind
        yield inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[kind, option],
        )


def _settings(settings_class: type[Settings], given: dict[str, Any]) -> Settings:
    """Return settings with their part of the given values, which is removed."""
    fields = _fields(settings_class)
    values = {name: given.pop(name) for name in fields}
    chosen = {
        name: value
        for name, value in values.items()
        if value not in (None, []) and str(value) != str(fields[name].default)
    }

    def flag_of(key: str) -> str:
        name = key.partition(".")[0]
        return _flag(name, settings_class.model_fields[name])

    return validate_settings(settings_class, chosen, source="the command line", name_of=flag_of)


def _fields(settings_class: type[Settings]) -> dict[str, FieldInfo]:
    fields = settings_class.model_fields.items()
    return {name: field for name, field in fields if field.default_factory is None}


def _is_list(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is tuple


def _flag(name: str, field: FieldInfo) -> str:
    """Return the name of an option; that of one which may be repeated is in the singular."""
    if name in _FLAGS:
        return _FLAGS[name]
    if _is_list(field):
        name = re.sub("s$", "", re.sub("ies$", "y", name))
    return f"--{name.replace('_', '-')}"


def _value_name(name: str, field: FieldInfo) -> str:
    """Return the name of an option's value in help texts, such as N, or auto|N."""
    types = [kind for kind in innermost_types(field.annotation) if kind is not type(None)]
    if Path in types and "folder" in (field.description or "").partition(".")[0].lower():
        return "FOLDER"
    words = [kind if isinstance(kind, str) else _VALUES.get(kind) for kind in types]
    text = "|".join(filter(None, words))
    return _VALUES_OF.get(name) or (text if 0 < len(text) < _LONG else name.upper())
