"""Options that several commands share, and conversion of a command's options to settings."""

import os
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from jakiro.cli.output import say
from jakiro.errors import ConfigError
from jakiro.utils.dtype_names import long_dtype
from jakiro.utils.settings import (
    Settings,
    apply_overrides,
    read_layered_yaml,
    validate_settings,
)

if TYPE_CHECKING:
    from typer import Context as Context

    from inference.autotune.compute import Packed, Threads
else:
    Context = typer.Context.__base__  # typer declares a subclass but passes this class

SettingsT = TypeVar("SettingsT", bound=Settings)

Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY.PATH=VALUE",
        callback=lambda overrides: _checked_overrides(overrides),
        help="Replace a value of the settings file; may be repeated.",
    ),
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16", "fp32", "bf16", "fp16"],
    typer.Option(
        metavar="auto|float32|bfloat16|float16",
        callback=long_dtype,
        help="Dtype of the target; auto: the dtype of its checkpoint or, for a GGUF file, bfloat16 "
        "if the hardware supports it, and float32 otherwise. The names fp32, bf16 and fp16 are "
        "accepted as well.",
    ),
]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Device to compute on.")]
TopP = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=1,
        help="As in generate(); by default the value of the target's generation config.",
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(
        min=0, help="As in generate(); by default the value of the target's generation config."
    ),
]
DRAFTERS = (
    "aded, aded=TABLE, lookup, lm=MODEL (a smaller model with the same tokenizer), or two "
    "drafters that share trees, such as aded+drafter=DRAFTER"
)
DrafterName = Annotated[
    str,
    typer.Argument(
        help="Folder or hub id of a drafter, or smollm2-135m-instruct for the drafter in this "
        f"package; or, with --target, {DRAFTERS}."
    ),
]
TargetOfDrafter = Annotated[
    str | None,
    typer.Option(
        metavar="PATH_OR_HUB_ID",
        callback=lambda name: existing_model(name),
        help="The target; by default the one that the drafter's config names.",
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="0 for greedy decoding, above 0 for sampling; by default the value of the target's "
        "generation config.",
    ),
]
System = Annotated[
    str | None, typer.Option(metavar="TEXT", help="System prompt: instructions for a chat model.")
]
Raw = Annotated[
    bool,
    typer.Option(
        "--raw",
        help="Continue the prompt as plain text. By default, the target's chat template is used, "
        "if there is one.",
    ),
]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Largest number of new tokens.")]
Stats = Annotated[bool, typer.Option("--stats", help="Print statistics to standard error.")]
TreeChoice = Annotated[
    Literal["auto", "fixed"],
    typer.Option(
        help="auto: measured costs and acceptance rates determine the tree in each decoding "
        "step; fixed: trees of one shape, with the levels that the drafter was trained for."
    ),
]
Compiled = Annotated[
    bool,
    typer.Option(
        "--compile", help="Compile decoding steps and the drafter; the first steps are then slow."
    ),
]
Captured = Annotated[
    bool,
    typer.Option(
        "--capture",
        help="On a GPU, record decoding steps as CUDA graphs, and start each step before the "
        "result of the previous one is read (experimental).",
    ),
]
OtherWeights = Annotated[
    bool,
    typer.Option(
        "--other-weights",
        help="Use a trained drafter even if the target's weights differ from those that it was "
        "trained for, for example because they were not quantized.",
    ),
]
ThreadCount = Annotated[
    str,
    typer.Option(
        metavar="auto|N",
        callback=lambda value: _checked_threads(value),
        help="Number of threads of decoding steps on a CPU; auto measures which is fastest.",
    ),
]
PackedWeights = Annotated[
    Literal["auto", "yes", "no"],
    typer.Option(
        help="Whether to compute with reordered copies of the target's weights on a CPU, which "
        "doubles its memory; auto measures what is faster."
    ),
]
BatchInvariant = Annotated[
    bool,
    typer.Option(
        "--batch-invariant",
        help="For a target in half precision on a CPU: compute in such a way that drafts never "
        "change greedy text, which makes decoding steps slower.",
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
SkipBadRecords = Annotated[
    bool,
    typer.Option(
        "--skip-bad-records",
        help="Leave out unusable records and report how many; by default, they are errors.",
    ),
]
NumPrompts = Annotated[
    int | None,
    typer.Option(help="Largest number of prompts; by default all prompts in the file."),
]
NewFolder = Annotated[Path, typer.Option(metavar="FOLDER", help="New folder to write.")]
JsonOut = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write all measured values to this file; - for standard output.",
    ),
]
RecordsOut = Annotated[
    Path,
    typer.Option(
        metavar="FILE.jsonl", help="File to write; the file of an interrupted run is continued."
    ),
]
WritingDrafter = Annotated[
    str | None,
    typer.Option(
        metavar="DRAFTER",
        callback=lambda name: _existing_drafter(name),
        help=f"Drafter that speeds up the target: a folder or hub id, or {DRAFTERS}.",
    ),
]


def as_threads(value: str) -> "Threads":
    """Return the value of `--threads` as an argument of `SpeculativeDecoder`.

    Raises:
        ConfigError: the value is neither "auto" nor a number of at least 1.
    """
    if value == "auto":
        return "auto"
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(
            "--threads cannot be used",
            expected="auto, or a number of at least 1",
            got=value,
        )
    return int(value)


def _checked_threads(value: str) -> str:
    """Return the value; print a warning if there are fewer processors, which is hardly intended.

    It is no error, because rounding depends on the number of threads: a text of another machine
    may be repeated here.
    """
    threads, processors = as_threads(value), os.cpu_count()
    if isinstance(threads, int) and processors is not None and threads > processors:
        say(
            f"warning: --threads is more than the number of this machine's processors, which makes "
            f"decoding slow; expected: at most {processors}; got: {threads}; remedy: leave out "
            "--threads to measure which number is fastest"
        )
    return value


def _checked_overrides(overrides: list[str] | None) -> list[str] | None:
    apply_overrides({}, overrides or ())
    return overrides


def readable_settings(path: Path) -> Path:
    """Return the path or name of a settings file, if it and the files that it extends are YAML.

    Raises:
        ConfigError: a file cannot be read, or is not YAML.
    """
    read_layered_yaml(path)
    return path


def existing_file(path: Path | None) -> Path | None:
    """Return a path that was given for a file to read, or None if none was given.

    Raises:
        ConfigError: there is no file at the path.
    """
    if path is not None and not path.is_file():
        raise ConfigError(
            f"there is no file {path}",
            expected="an existing file",
            got="a folder" if path.is_dir() else "nothing at this path",
            remedy="check the path",
        )
    return path


def existing_model(name: str | None) -> str | None:
    """Return a name that was given for a model, or None if none was given.

    Raises:
        CheckpointError: there is certainly no such model (see `refuse_missing_model`).
        ConfigError: the name is that of a missing GGUF file.
    """
    from jakiro.utils.model_names import refuse_missing_model

    if name is not None:
        refuse_missing_model(name)
    return name


def _existing_drafter(name: str | None) -> str | None:
    from inference.drafters.names import refuse_missing_drafters

    if name is not None:
        refuse_missing_drafters(name)
    return name


def existing_tokenizer(name: str) -> str:
    """Return a name that was given for a tokenizer; this raises the errors of `existing_model`."""
    from jakiro.utils.model_names import refuse_missing_model

    refuse_missing_model(name, "a tokenizer from")
    return name


def as_packed(value: Literal["auto", "yes", "no"]) -> "Packed":
    """Return the value of `--packed` as an argument of `SpeculativeDecoder`."""
    return "auto" if value == "auto" else value == "yes"


def settings_from(context: Context, settings_class: type[SettingsT], **changes: Any) -> SettingsT:
    """Return settings whose fields have the values of the options with the same names.

    Error messages name the options as users type them.

    Args:
        context: context of the running command.
        settings_class: class of the settings. A field keeps its default if it has no option, or if
            its option was not given and has no default.
        **changes: values that replace those of the options.

    Raises:
        ConfigError: an option has an unusable value.
    """
    given = {name: context.params.get(name) for name in settings_class.model_fields} | changes
    values = {name: value for name, value in given.items() if value not in (None, [], ())}
    flags = flags_of(context)

    def as_typed(key: str) -> str:
        name = key.partition(".")[0]
        return flags.get(name, name)

    return validate_settings(settings_class, values, source="the command line", name_of=as_typed)


def flags_of(context: Context) -> dict[str, str]:
    """Return the options of the running command as users type them, by parameter name."""
    return {str(parameter.name): parameter.opts[0] for parameter in context.command.params}


def refuse_others(context: Context, allowed: Collection[str], reason: str) -> None:
    """Raise an error if an option was given that has no effect.

    Args:
        context: context of the running command.
        allowed: names of the parameters that have an effect.
        reason: option that makes the others useless, and what it does.

    Raises:
        ConfigError: such an option was given.
    """
    if given := _given(context, flags_of(context).keys() - {*allowed, "help"}):
        raise ConfigError(
            f"{reason}; other options would have no effect",
            expected=f"only {', '.join(sorted(_flags(context, allowed)))}",
            got=", ".join(given),
            remedy="leave the other options out",
        )


def refuse_given(context: Context, names: Collection[str], missing: str) -> None:
    """Raise an error if an option was given that requires another option.

    Args:
        context: context of the running command.
        names: names of the parameters that require it.
        missing: the option that they require.

    Raises:
        ConfigError: such an option was given.
    """
    if given := _given(context, names):
        raise ConfigError(
            f"{given[0]} requires {missing}",
            expected=f"{missing} and {given[0]}",
            got=", ".join(given),
            remedy=f"add {missing}, or leave {given[0]} out",
        )


def _given(context: Context, names: Collection[str]) -> list[str]:
    """Return those options that were given on the command line, as users type them."""
    sources = {name: context.get_parameter_source(name) for name in names}
    given = [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]
    return sorted(_flags(context, given))


def _flags(context: Context, names: Collection[str]) -> list[str]:
    return [flag for name, flag in flags_of(context).items() if name in names]
