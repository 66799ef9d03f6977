"""The generated parts of the documentation are up to date."""

from pathlib import Path

import pytest
import typer
from helpers.programs import load_program
from typer.cli import get_docs_for_click
from typer.core import MARKUP_MODE_KEY

from jakiro.cli import app

ROOT = Path(__file__).parents[2]


def test_figures_are_made_from_the_recorded_data() -> None:
    drawings = load_program("figures").drawings()
    assert len(drawings) == 2
    assert [path.name for path, text in drawings.items() if path.read_text() != text] == []


def test_every_key_is_described() -> None:
    reference = load_program("reference")
    empty = [line for line in reference.config_page().splitlines() if line.endswith("|  |")]
    assert empty == []


@pytest.mark.parametrize("name", ["base_yaml", "config_page"])
def test_keys_are_described_as_at_their_fields(name: str) -> None:
    reference = load_program("reference")
    path = {"base_yaml": reference.BASE, "config_page": reference.CONFIG}[name]
    assert path.read_text() == getattr(reference, name)(), "remedy: make reference"


def test_the_reference_of_the_command_line_has_every_command() -> None:
    command = typer.main.get_command(app)
    context = typer.Context(command)
    context.obj = {MARKUP_MODE_KEY: app.rich_markup_mode}
    text = get_docs_for_click(obj=command, ctx=context, name="jakiro", title="Command line")
    page = (ROOT / "docs" / "reference" / "cli.md").read_text()
    assert page.strip() == text.strip(), "remedy: make reference"


def test_the_tables_of_the_screening_are_made_from_the_stored_results() -> None:
    screening = load_program("screening")
    assert screening.PAGE.read_text() == screening.page(), "remedy: make screening"
    assert screening.PUBLISHED_PAGE.read_text() == screening.published_page()
