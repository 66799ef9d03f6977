"""The command `jakiro export`."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from jakiro.cli import options
from jakiro.errors import ConfigError, TargetMismatch
from jakiro.utils.files import ensure_new_file
from jakiro.utils.logs import quiet_libraries
from jakiro.utils.settings import Settings

if TYPE_CHECKING:
    from jakiro.drafter import JakiroDrafter
    from jakiro.exchange.eagle3_export import ServedTarget
    from jakiro.target.adapter import TargetAdapter
    from jakiro.target.record import TargetRecord

_REMEDY = "pass the target's current folder or id as --target"


class ExportSettings(Settings):
    """Options."""

    to: Literal["eagle3", "speculators", "vllm", "device"]
    """Layout to write. eagle3: for vLLM, SGLang and TensorRT-LLM; speculators: a folder that vLLM
    serves without other arguments; vllm: most other drafters, for vLLM in an environment where
    jakiro is installed; device: for jakiro connect on a machine without the target."""
    out: Path
    """New folder to write."""
    target: str | None = None
    """The target; by default the one that the drafter's config names."""
    without_layer_ids: bool = False
    """Leave out the indices of the fused hidden states, for older versions of SGLang; they must be
    the default ones of EAGLE-3."""
    embedding: Literal["int8", "own"] = "int8"
    """Format of the target's embedding in the layout device. int8 takes half of the space of bf16,
    and may change drafts, but never the text's distribution."""


@options.with_options
@quiet_libraries()
def export_drafter(
    *,
    drafter: Annotated[
        str,
        typer.Argument(
            metavar="DRAFTER", help="Folder, hub id or name of a drafter.", show_default=False
        ),
    ],
    settings: ExportSettings,
) -> None:
    """Write a drafter in the format of another engine, or for a machine without the target.

    The layouts eagle3 and speculators require the architecture of EAGLE-3. The layout device has
    the target's tokenizer, its embedding and the rows of its head for the tokens that may be
    drafted, but not its layers.
    """
    to, out = settings.to, settings.out
    if settings.without_layer_ids and to not in ("eagle3", "speculators"):
        raise ConfigError(f"--without-layer-ids cannot be used with --to {to}")
    ensure_new_file(out, "a drafter")
    from jakiro.drafter import JakiroDrafter
    from jakiro.exchange.eagle3_export import checksums_in

    loaded = JakiroDrafter.from_pretrained(drafter)
    name = settings.target or loaded.config.target_record.name_or_path
    if to == "device":
        commands = _write_device(loaded, name, settings, drafter)
    else:
        commands = _write_layout(loaded, name, settings)
    for file, digest in checksums_in(out).items():
        typer.echo(f"sha256 of {file}: {digest} ({(out / file).stat().st_size / 1e6:.1f} MB)")
    typer.echo(f"wrote {out}; to use it:")
    for place, command in commands.items():
        typer.echo(f"  {command}    # {place}")


def _write_device(
    drafter: "JakiroDrafter", target: str, settings: ExportSettings, name: str
) -> dict[str, str]:
    """Write the folder of a machine without the target; return commands by where to run them."""
    from jakiro.exchange.device_export import export_device
    from jakiro.utils.pretrained import load_tokenizer

    tokenizer = load_tokenizer(target, "the tokenizer of the target", remedy=_REMEDY)
    export_device(drafter, _load(target), tokenizer, settings.out, settings.embedding)
    serve = ["jakiro", "serve", "--target", target, "--drafter", name, "--remote-sessions", "8"]
    connect = ["jakiro", "connect", "http://HOST:8000/v1", "--drafter", str(settings.out)]
    return {"where the target is": shlex.join(serve), "on the other machine": shlex.join(connect)}


def _write_layout(
    drafter: "JakiroDrafter", target: str, settings: ExportSettings
) -> dict[str, str]:
    """Write the folder of another engine; return commands by the names of engines."""
    from jakiro.exchange.eagle3_export import (
        export_eagle3,
        serve_commands,
        without_ids,
        write_export,
    )
    from jakiro.exchange.vllm_export import export_vllm
    from jakiro.target.record import check_target
    from jakiro.utils.pretrained import local_model

    record, to, out = drafter.config.target_record, settings.to, settings.out
    assert to != "device", "the caller writes this layout"
    if to == "vllm":
        adapter = _load(target)
        check_target(record, adapter.spec)
        exported = export_vllm(drafter, adapter)
    else:
        exported = export_eagle3(drafter, to, _facts_of(target, record))
    if settings.without_layer_ids:
        exported = without_ids(exported, record)
    write_export(exported.weights, exported.config, out)
    for part in exported.dropped:
        typer.echo(f"dropped: {part}")
    depth = drafter.config.settings.schedule.autoregressive_levels
    commands = serve_commands(to, str(out), local_model(target), depth)
    return {str(engine): command for engine, command in commands.items()}


def _load(target: str) -> "TargetAdapter":
    from jakiro.target.adapter import TargetAdapter
    from jakiro.utils.pretrained import load_causal_lm

    return TargetAdapter(load_causal_lm(target, dtype="auto", device="cpu", remedy=_REMEDY))


def _facts_of(target: str, record: "TargetRecord") -> "ServedTarget":
    """Return facts about a target from its config, after a comparison with the drafter's record."""
    from jakiro.exchange.eagle3_export import ServedTarget
    from jakiro.exchange.plan import check_config_scales
    from jakiro.utils.pretrained import load_config, local_model

    config = load_config(target, remedy=_REMEDY)
    text: Any = config.get_text_config()
    if (got := getattr(text, "hidden_size", None)) != record.hidden_size:
        raise TargetMismatch(
            f"the drafter was made for another target than {target} (hidden size differs)",
            expected=f"{record.hidden_size}, as in {record.name_or_path}",
            got=got,
            remedy=_REMEDY,
        )
    architecture = str((config.architectures or ["unknown"])[0])
    check_config_scales(text, architecture, "decode with `jakiro generate`, which applies them")
    return ServedTarget(local_model(target), architecture, text.max_position_embeddings)
