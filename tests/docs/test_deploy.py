"""The container file, the compose example and the systemd unit start a command that exists."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import typer
import yaml

from jakiro.cli import app

ROOT = Path(__file__).parents[2]
CONTAINERFILE = (ROOT / "Containerfile").read_text()
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["jakiro"]
PAGE = (ROOT / "docs" / "guides" / "deploy.md").read_text()
TEXTS = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
ENTRY = json.loads(re.findall(r"^ENTRYPOINT (.*)$", CONTAINERFILE, re.MULTILINE)[0])


def _options(words: list[str]) -> dict[str, Any]:
    """Return the options of a `jakiro` command, or raise an error if there are no such options.

    A folder that exists takes the place of the target's.
    """
    words = [str(ROOT) if word.endswith("/models/target") else word for word in words]
    group: Any = typer.main.get_command(app)
    command = group.commands[words[1]]
    options: dict[str, Any] = command.make_context(words[1], list(words[2:])).params
    return options


def test_the_container_starts_the_server_without_root() -> None:
    options = _options([*ENTRY, *COMPOSE["command"]])
    assert (options["host"], options["port"]) == ("0.0.0.0", "8000")
    assert float(options["drain_seconds"]) < int(COMPOSE["stop_grace_period"].removesuffix("s"))
    *_, user = re.findall(r"^USER (\d+):\d+$", CONTAINERFILE, re.MULTILINE)
    assert int(user) > 0
    assert COMPOSE["ports"] == ["127.0.0.1:8000:8000"]
    assert "JAKIRO_API_KEY:?" in COMPOSE["environment"]["JAKIRO_API_KEY"]


def test_the_image_contains_what_the_wheel_is_built_from() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    kept = [line.removeprefix("!/") for line in lines if line.startswith("!")]
    assert [name for name in kept if not (ROOT / name).exists()] == []
    assert {"moa", "jakiro", "inference", "training", "configs", "pyproject.toml"} <= set(kept)


def test_the_command_and_the_unit_of_the_page_start_the_server() -> None:
    (block,) = (text for text in TEXTS if "docker run" in text)
    words = shlex.split(block.partition("docker run")[2].replace("\\\n", " "))
    options = _options([*ENTRY, *words[words.index("jakiro") + 1 :]])
    assert float(options["drain_seconds"]) < int(words[words.index("--stop-timeout") + 1])
    (unit,) = (text for text in TEXTS if "[Unit]" in text)
    lines = dict(line.split("=", 1) for line in unit.splitlines() if "=" in line)
    options = _options(shlex.split(lines["ExecStart"]))
    assert float(options["drain_seconds"]) < int(lines["TimeoutStopSec"])
