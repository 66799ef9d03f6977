"""The commands `jakiro import` and `jakiro export`."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import PositiveInt

from jakiro.cli import options
from jakiro.cli.output import say
from jakiro.cli.settings import LoadSettings
from jakiro.errors import CheckpointError, ConfigError, TargetMismatch, TargetNotSupported
from jakiro.utils.files import ensure_new_file, write_atomically
from jakiro.utils.logs import quiet_libraries
from jakiro.utils.settings import Settings

if TYPE_CHECKING:
    from inference.benchmark.agreement import Agreement
    from jakiro.drafter import JakiroDrafter
    from jakiro.exchange.eagle3_export import ServedTarget
    from jakiro.exchange.plan import ImportPlan
    from jakiro.target.adapter import TargetAdapter
    from jakiro.target.record import TargetRecord

_REMEDY = "pass the target's current folder or id as --target"


class ImportSettings(Settings):
    target: str | None = None
    """The target that the drafter was published for."""
    out: Path | None = None
    """New folder for the drafter."""
    revision: str | None = None
    """Commit, branch or tag of the drafter on the hub."""
    prompts: Path | None = None
    """Prompt file to measure agreement and tau with, as for `jakiro bench`; by default a few
    built-in prompts."""
    num_prompts: PositiveInt = 16
    """Largest number of prompts."""
    max_new_tokens: PositiveInt = 32
    """Largest number of tokens to decode for each prompt."""
    dry_run: bool = False
    """Show the family, the settings and the use of each tensor; needs no target and writes
    nothing."""
    force: bool = False
    """Write the drafter even if it agrees with the target less often than the most frequent
    token."""


@options.with_options
@quiet_libraries()
def import_drafter(
    *,
    head: Annotated[
        str,
        typer.Argument(
            metavar="HEAD",
            help="Folder or hub id of the published drafter.",
            show_default=False,
        ),
    ],
    settings: ImportSettings,
    load: LoadSettings,
) -> None:
    """Convert a published drafter (EAGLE-1 to 3, HASS, DFlash, DSpark, MoA, Jakiro); measure it.

    The family is recognized by the tensors. Every tensor is used, or left out for a stated reason.
    Before anything is written, the drafter's agreement with the target and tau are measured.
    """
    target, out = settings.target, settings.out
    if not settings.dry_run and (target is None or out is None):
        raise ConfigError("an import needs --target and --out, or --dry-run")
    if out is not None:
        ensure_new_file(out, "a drafter")
    from jakiro.exchange.checkpoint import read_checkpoint
    from jakiro.exchange.families import plan_import
    from jakiro.exchange.plan import SETTINGS_FILE, record_of, write_import

    plan = plan_import(read_checkpoint(head, settings.revision))
    for line in plan.lines():
        typer.echo(line)
    if settings.dry_run or target is None or out is None:
        return
    drafter, measured, facts = _measure_candidates(plan, target, load, settings)
    typer.echo(str(measured))
    if not (measured.is_above_floor or settings.force):
        raise CheckpointError(
            "the imported drafter does not fit the target, so nothing was written",
            expected=f"an agreement above {measured.floor:.1%}",
            got=f"{measured.agreement:.1%}",
            remedy="check --target, or measure on other --prompts; --force writes it anyway",
        )
    drafter.config.record = record_of(
        plan,
        measured.model_dump()
        | {"is_above_floor": measured.is_above_floor}
        | {"prompts": str(settings.prompts or "built-in")}
        | facts,
    )
    write_import(drafter, out)
    typer.echo(f"wrote {out}")
    if (out / SETTINGS_FILE).exists():
        typer.echo(
            f"to train it further, start a settings file with\n  extends: {out / SETTINGS_FILE}"
        )


def _measure_candidates(
    plan: "ImportPlan", target: str, load: LoadSettings, settings: ImportSettings
) -> tuple["JakiroDrafter", "Agreement", dict[str, Any]]:
    """Return the drafter that agrees best, its agreement, and facts about the alternatives."""
    from inference.benchmark.agreement import measure_agreement
    from inference.generation.prompt_file import BUILT_IN, read_prompts
    from jakiro.exchange.plan import build_drafter, check_fits, distinctions
    from jakiro.target.adapter import TargetAdapter
    from jakiro.target.record import record_target
    from jakiro.utils.pretrained import load_target

    path, count = settings.prompts, settings.num_prompts
    texts = BUILT_IN if path is None else [prompt.first for prompt in read_prompts(path, count)]
    say(f"loading the target {target}")
    model, tokenizer = load_target(target, load.dtype, load.torch_device)
    adapter = TargetAdapter(model)
    check_fits(plan, adapter)
    candidates = plan.candidates((adapter.spec.num_hidden_states or 0) - 1)
    weights = plan.weights(adapter)
    record = record_target(adapter.spec, target, tokenizer)
    names = distinctions([candidate.model_dump() for candidate in candidates])
    measured = {}
    for name, candidate in zip(names, candidates, strict=True):
        drafter = build_drafter(candidate, record, dict(weights))
        try:
            measured[name] = measure_agreement(
                model, drafter, tokenizer, texts[:count], settings.max_new_tokens
            )
        except TargetNotSupported as error:
            if len(candidates) == 1 or not candidate.tail_layers:
                raise
            typer.echo(f"{name}: cannot be measured, because {error}")
        if len(candidates) > 1 and name in measured:
            typer.echo(f"{name}: {measured[name]}")
    best = max(measured, key=lambda name: measured[name].agreement)
    if len(measured) > 1:
        typer.echo(f"kept: {best}")
    others = {name: value.agreement for name, value in measured.items() if name != best}
    facts = {"alternatives": others} if others else {}
    # Measuring has moved the drafter to the device and the dtype of the target.
    drafter = build_drafter(candidates[names.index(best)], record, weights)
    return drafter, measured[best], facts


class ExportSettings(Settings):
    to: Literal["eagle3", "speculators", "dflash", "vllm", "device"]
    """Layout to write. eagle3: for vLLM, SGLang and TensorRT-LLM; speculators: a folder that vLLM
    serves without other arguments; dflash: block drafters, for vLLM and SGLang; vllm: most other
    drafters, for vLLM in an environment where jakiro is installed; device: for jakiro connect on a
    machine without the target."""
    out: Path
    """New folder to write."""
    target: str | None = None
    """The target; by default the one that the drafter's config names."""
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

    The layouts eagle3 and speculators require the architecture of EAGLE-3, and dflash that of
    DFlash or DSpark. The layout device has the target's tokenizer, its embedding and the rows of
    its head for the tokens that may be drafted, but not its layers.
    """
    to, out = settings.to, settings.out
    ensure_new_file(out, "a drafter")
    from jakiro.drafter import JakiroDrafter

    loaded = JakiroDrafter.from_pretrained(drafter)
    name = settings.target or loaded.config.target_record.name_or_path
    if to == "device":
        commands = _write_device(loaded, name, settings, drafter)
    else:
        commands = _write_layout(loaded, name, settings)
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
    from jakiro.exchange.dflash import export_dflash
    from jakiro.exchange.eagle3_export import export_eagle3, serve_command, write_export
    from jakiro.exchange.vllm_export import export_vllm
    from jakiro.target.record import check_target
    from jakiro.utils.pretrained import local_model
    from training.loop.export import model_card

    record, to, out = drafter.config.target_record, settings.to, settings.out
    assert to != "device", "the caller writes this layout"
    if to == "vllm":
        adapter = _load(target)
        check_target(record, adapter.spec)
        exported = export_vllm(drafter, adapter)
    elif to == "dflash":
        exported = export_dflash(drafter, _facts_of(target, record))
    else:
        exported = export_eagle3(drafter, to, _facts_of(target, record))
    write_export(exported.weights, exported.config, out)
    for part in exported.dropped:
        typer.echo(f"dropped: {part}")
    schedule = drafter.config.settings.schedule
    config: Any = drafter.config
    if "settings" in (config.record or {}):  # it was trained here
        published = serve_command(to, "FOLDER", "TARGET", schedule)
        write_atomically(out / "README.md", model_card(config, published))
    return {"vLLM": serve_command(to, str(out), local_model(target), schedule)}


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
