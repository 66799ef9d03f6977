"""The generated parts of the documentation are up to date."""

import runpy
from pathlib import Path

import typer
from typer.cli import get_docs_for_click
from typer.core import MARKUP_MODE_KEY

from jakiro.cli import app

DOCS = Path(__file__).parents[2] / "docs"


def test_keys_are_described_as_at_their_fields() -> None:
    reference = runpy.run_path(str(DOCS / "programs" / "reference.py"))
    assert reference["BASE"].read_text() == reference["base_yaml"](), "remedy: make reference"
    assert reference["CONFIG"].read_text() == reference["config_page"](), "remedy: make reference"


def test_the_reference_of_the_command_line_has_every_command() -> None:
    command = typer.main.get_command(app)
    context = typer.Context(command)
    context.obj = {MARKUP_MODE_KEY: app.rich_markup_mode}
    text = get_docs_for_click(obj=command, ctx=context, name="jakiro", title="Command line")
    page = (DOCS / "reference" / "cli.md").read_text()
    assert page.strip() == text.strip(), "remedy: make reference"
