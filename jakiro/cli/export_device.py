"""The command `jakiro export-device`."""

import shlex
from typing import Annotated, Literal

import typer

from jakiro.cli import options
from jakiro.utils.files import ensure_new_file
from jakiro.utils.logs import quiet_libraries
from jakiro.utils.model_names import refuse_missing_drafter


@quiet_libraries()
def export_device(
    drafter: Annotated[
        str,
        typer.Argument(
            metavar="DRAFTER",
            help="Folder, hub id or name of a trained drafter.",
            show_default=False,
        ),
    ],
    out: options.NewFolder,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="PATH_OR_HUB_ID",
            callback=options.existing_model,
            help="The target; by default the one that the drafter's config names.",
        ),
    ] = None,
    embedding: Annotated[
        Literal["int8", "own"],
        typer.Option(
            help="Format of the target's embedding. int8 takes half of the space of bf16, and may "
            "change drafts, but never the text's distribution."
        ),
    ] = "int8",
) -> None:
    """Write a folder with which `jakiro connect` drafts on a machine without the target.

    The folder has the drafter, the target's tokenizer and chat template, its embedding, and the
    rows of its head for the tokens that may be drafted; the target's layers are not in it.
    """
    refuse_missing_drafter(drafter)
    ensure_new_file(out, "a drafter")
    from jakiro.drafter import JakiroDrafter
    from jakiro.exchange.device_export import export_device as write
    from jakiro.exchange.writing import checksums_in
    from jakiro.target.adapter import TargetAdapter
    from jakiro.utils.pretrained import load_causal_lm, load_tokenizer

    loaded = JakiroDrafter.from_pretrained(drafter)
    name = target or loaded.config.target_record.name_or_path
    remedy = "pass the target's current folder or id as --target"
    model = load_causal_lm(name, dtype="auto", device="cpu", remedy=remedy)
    tokenizer = load_tokenizer(name, "the tokenizer of the target", remedy=remedy)
    write(loaded, TargetAdapter(model), tokenizer, out, embedding)
    for file, digest in checksums_in(out).items():
        size = (out / file).stat().st_size / 1e6
        typer.echo(f"{file}: {size:.1f} MB, sha256 {digest}")
    typer.echo(f"wrote {out}; to use it:")
    serve = ["jakiro", "serve", "--target", name, "--drafter", drafter, "--remote-sessions", "8"]
    connect = ["jakiro", "connect", "http://HOST:8000/v1", "--drafter", str(out)]
    typer.echo(f"  {shlex.join(serve)}")
    typer.echo(f"  {shlex.join(connect)}    # on the other machine")
