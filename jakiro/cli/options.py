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

_FLAGS = {"overrides": "--set", "trees": "--trees"}  # options that are not named after their field
_VALUES: dict[object, str] = {int: "N", float: "X", bool: "yes|no", Path: "FILE"}
_LONG = 20  # number of characters from which values are named in the help text only

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
WritingDrafter = Annotated[
    str | None,
    typer.Option(
        metavar="DRAFTER",
        help=f"Drafter that speeds up the target: a folder or hub id, or {DRAFTERS}.",
    ),
]
TargetOfDrafter = Annotated[
    str | None,
    typer.Option(
        metavar="PATH_OR_HUB_ID",
        help="The target; by default the one that the drafter's config names.",
    ),
]
Raw = Annotated[
    bool,
    typer.Option(
        "--raw",
        help="Continue the prompt as plain text. By default, the target's chat template is used, "
        "if there is one.",
    ),
]
System = Annotated[
    str | None, typer.Option(metavar="TEXT", help="System prompt: instructions for a chat model.")
]
Stats = Annotated[bool, typer.Option("--stats", help="Print statistics to standard error.")]
SettingsFile = Annotated[
    Path,
    typer.Option(
        "--config",
        metavar="FILE",
        help="YAML file with the settings of a training run, or the name of a packaged one.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY.PATH=VALUE",
        help="Replace a value of the settings file; may be repeated.",
    ),
]
DataPaths = Annotated[
    list[str],
    typer.Option(
        "--data",
        metavar="PATH",
        help="Data file, folder of data files, or hub dataset as NAME or NAME:SPLIT; may be "
        "repeated.",
    ),
]
NewFolder = Annotated[Path, typer.Option(metavar="FOLDER", help="New folder to write.")]
RecordsOut = Annotated[
    Path,
    typer.Option(
        metavar="FILE.jsonl", help="File to write; the file of an interrupted run is continued."
    ),
]
JsonOut = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write all measured values to this file; - for standard output.",
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

    shown: list[inspect.Parameter] = []
    for name, parameter in parameters.items():
        if name in classes:
            shown += _options(classes[name])
        else:
            shown.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in shown}
    return run


def _options(settings_class: type[Settings]) -> Iterator[inspect.Parameter]:
    panel = (settings_class.__doc__ or "").partition("\n")[0].rstrip(".")
    for name, field in _fields(settings_class).items():
        default: Any = inspect.Parameter.empty if field.is_required() else field.default
        kind: Any = field.annotation if field.annotation is bool else str
        text = " ".join((field.description or "").split())
        several = ", ".join(map(str, default)) if isinstance(default, tuple) else ""
        if _is_list(field):
            kind, text = list[str], f"{text} May be repeated."
            default = default if field.is_required() else None
        option = typer.Option(
            *([] if default is True else [_flag(name, field)]),  # else it has a flag that says no
            metavar=None if kind is bool else _value_name(name, field),
            help=text,
            show_default=several or True,
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

    def as_typed(key: str) -> str:
        name = key.partition(".")[0]
        return _flag(name, settings_class.model_fields[name])

    return validate_settings(settings_class, chosen, source="the command line", name_of=as_typed)


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
    if name in ("folder", "out") or name.endswith("_folder"):
        return "FOLDER"
    if name == "prompts":
        return "FILE"
    types = [kind for kind in innermost_types(field.annotation) if kind is not type(None)]
    words = [kind if isinstance(kind, str) else _VALUES.get(kind) for kind in types]
    text = "|".join(filter(None, words))
    return text if 0 < len(text) < _LONG else name.upper()
