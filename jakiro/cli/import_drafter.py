"""The command `jakiro import`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import PositiveInt

from jakiro.cli import options
from jakiro.cli.decoding import LoadSettings
from jakiro.cli.output import say
from jakiro.errors import CheckpointError, ConfigError
from jakiro.utils.files import ensure_new_file
from jakiro.utils.logs import quiet_libraries
from jakiro.utils.settings import Settings

if TYPE_CHECKING:
    from inference.benchmark.agreement import Agreement
    from jakiro.drafter import JakiroDrafter
    from jakiro.exchange.plan import ImportPlan


class ImportSettings(Settings):
    """Options."""

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
    """Convert a published drafter (EAGLE-1 to EAGLE-3, HASS, MoA, Jakiro), and measure it.

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
    drafter, measured, facts = _measured(plan, target, load, settings)
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
    typer.echo(f"wrote {out}; to train it further, start a settings file with")
    typer.echo(f"  extends: {out / SETTINGS_FILE}")


def _measured(
    plan: "ImportPlan", target: str, load: LoadSettings, settings: ImportSettings
) -> tuple["JakiroDrafter", "Agreement", dict[str, Any]]:
    """Return the drafter that agrees best, its agreement, and facts about the alternatives."""
    from inference.benchmark.agreement import choose_best
    from inference.generation.prompt_file import BUILT_IN, read_prompts
    from jakiro.exchange.plan import build_drafter, check_fits, distinctions
    from jakiro.target.adapter import TargetAdapter
    from jakiro.target.record import record_target
    from jakiro.utils.pretrained import load_causal_lm, load_tokenizer

    path, count = settings.prompts, settings.num_prompts
    texts = BUILT_IN if path is None else [each.first for each in read_prompts(path, count)]
    say(f"loading the target {target}")
    model = load_causal_lm(target, dtype=load.dtype, device=load.torch_device)
    tokenizer = load_tokenizer(target, "the tokenizer of the target")
    adapter = TargetAdapter(model)
    check_fits(plan, adapter)
    candidates = plan.candidates((adapter.spec.num_hidden_states or 0) - 1)
    weights = plan.table.converted()
    record = record_target(adapter.spec, target, tokenizer)
    names = distinctions([each.model_dump() for each in candidates])
    decoded = (tokenizer, texts[:count], settings.max_new_tokens)
    measured = {}
    for name, candidate in zip(names, candidates, strict=True):
        drafter = build_drafter(candidate, record, dict(weights))
        found = _agreement_of(drafter, model, decoded, name)
        if found is not None:
            measured[name] = found
    kept, level = choose_best(list(measured.values()))
    best = list(measured)[kept]
    if len(measured) > 1:
        typer.echo(f"kept: {best}")
    others = {name: each.agreement for name, each in measured.items() if name != best}
    undecided = [list(measured)[index] for index in level]
    facts = {"alternatives": others, "undecided": undecided} if others else {}
    if undecided:
        say(
            f"warning: these prompts do not show whether {' or '.join(undecided)} is better; "
            "to decide, measure on more --prompts"
        )
    # Measuring has moved the drafter to the device and the dtype of the target.
    drafter = build_drafter(candidates[names.index(best)], record, weights)
    return drafter, measured[best], facts


def _agreement_of(
    drafter: "JakiroDrafter", model: Any, decoded: tuple[Any, Any, int], name: str
) -> "Agreement | None":
    """Return the agreement of a drafter; None for an alternative that the target does not support.

    Only alternatives have a name, which is printed.
    """
    from inference.benchmark.agreement import measure_agreement
    from jakiro.errors import TargetNotSupported

    tokenizer, texts, max_new_tokens = decoded
    try:
        found = measure_agreement(model, drafter, tokenizer, texts, max_new_tokens)
    except TargetNotSupported as error:
        if not drafter.config.settings.tail_layers:
            raise
        typer.echo(f"{name}: cannot be measured, because {error}")
        return None
    if name:
        typer.echo(f"{name}: {found}")
    return found
