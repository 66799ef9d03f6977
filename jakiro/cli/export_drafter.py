"""The command `jakiro export`."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from jakiro.cli import options
from jakiro.errors import CheckpointError, ConfigError, TargetMismatch
from jakiro.utils.files import ensure_new_file
from jakiro.utils.logs import quiet_libraries
from jakiro.utils.model_names import refuse_missing_drafter

if TYPE_CHECKING:
    from jakiro.drafter import JakiroDrafter
    from jakiro.exchange.eagle3_export import Exported, ServedTarget
    from jakiro.target.record import TargetRecord


@quiet_libraries()
def export_drafter(
    drafter: Annotated[
        str,
        typer.Argument(
            metavar="DRAFTER", help="Folder or hub id of a drafter.", show_default=False
        ),
    ],
    to: Annotated[
        Literal["eagle3", "speculators", "vllm"],
        typer.Option(
            help="Layout to write. eagle3: for vLLM, SGLang and TensorRT-LLM; speculators: a "
            "folder that vLLM serves without other arguments; vllm: most other drafters, for vLLM "
            "in an environment where jakiro is installed."
        ),
    ],
    out: options.NewFolder,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="PATH_OR_HUB_ID",
            callback=options.existing_model,
            help="The target; by default the one that the drafter's config names. Its weights are "
            "read only for vllm.",
        ),
    ] = None,
    without_layer_ids: Annotated[
        bool,
        typer.Option(
            "--without-layer-ids",
            help="Leave out the indices of the fused hidden states, for older versions of SGLang; "
            "they must be the default ones of EAGLE-3.",
        ),
    ] = False,
) -> None:
    """Write a drafter, without approximation, in the format of another engine.

    The layouts eagle3 and speculators require the architecture of EAGLE-3.
    """
    if without_layer_ids and to == "vllm":
        raise ConfigError(
            "--without-layer-ids cannot be used with --to vllm",
            remedy="leave out this option",
        )
    refuse_missing_drafter(drafter)
    ensure_new_file(out, "a drafter")
    from jakiro.drafter import JakiroDrafter
    from jakiro.exchange.eagle3_export import export_eagle3, without_ids
    from jakiro.exchange.writing import checksums_in, serve_commands, write_export
    from jakiro.utils.pretrained import local_model

    loaded = JakiroDrafter.from_pretrained(drafter)
    name = target or loaded.config.target_record.name_or_path
    if to == "vllm":
        exported = _for_plugin(loaded, name)
    else:
        exported = export_eagle3(loaded, to, _facts_of(name, loaded.config.target_record))
    if without_layer_ids:
        exported = without_ids(exported, loaded.config.target_record)
    write_export(exported.weights, exported.config, out)
    for part in exported.dropped:
        typer.echo(f"dropped: {part}")
    for file, digest in checksums_in(out).items():
        typer.echo(f"sha256 of {file}: {digest}")
    depth = loaded.config.settings.schedule.autoregressive_levels
    typer.echo(f"wrote {out}; to serve it:")
    for engine, command in serve_commands(to, str(out), local_model(name), depth).items():
        typer.echo(f"  {command}    # {engine}")


def _for_plugin(drafter: "JakiroDrafter", name: str) -> "Exported":
    """Return a drafter for the plug-in, with copies of some weights of its target."""
    from jakiro.exchange.vllm_export import export_vllm
    from jakiro.target.adapter import TargetAdapter
    from jakiro.target.record import check_target
    from jakiro.utils.pretrained import load_causal_lm

    remedy = "pass the target's current folder or id as --target"
    target = TargetAdapter(load_causal_lm(name, dtype="auto", device="cpu", remedy=remedy))
    check_target(drafter.config.target_record, target.spec)
    return export_vllm(drafter, target)


def _facts_of(target: str, record: "TargetRecord") -> "ServedTarget":
    """Return facts about a target from its config, after a comparison with the drafter's record."""
    from jakiro.exchange.eagle3_export import ServedTarget
    from jakiro.exchange.plan import check_config_scales
    from jakiro.utils.pretrained import load_config, local_model

    remedy = "pass the target's current folder or id as --target"
    config = load_config(target, remedy=remedy)
    text: Any = config.get_text_config()
    architectures = list(config.architectures or ())
    position = getattr(text, "max_position_embeddings", None)
    if not architectures or not isinstance(position, int):
        raise CheckpointError(
            f"the config of {target} is incomplete",
            expected="architectures and max_position_embeddings",
            got=f"{architectures} and {position}",
            remedy=remedy,
        )
    if (got := getattr(text, "hidden_size", None)) != record.hidden_size:
        raise TargetMismatch(
            f"the drafter was made for another target than {target} (hidden size differs)",
            expected=f"{record.hidden_size}, as in {record.name_or_path}",
            got=got,
            remedy=remedy,
        )
    check_config_scales(text, architectures[0], "decode with `jakiro generate`, which applies them")
    return ServedTarget(local_model(target), architectures[0], position)
