"""The container file, the compose example and the systemd unit start a command that exists."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from helpers.certificates import self_signed
from helpers.serving import Running, running, tiny_decoder

from jakiro.cli import app

ROOT = Path(__file__).parents[2]
CONTAINERFILE = (ROOT / "Containerfile").read_text()
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["jakiro"]
PAGE = (ROOT / "docs" / "guides" / "deploy.md").read_text()
DRAIN_SECONDS = 30


def _options(words: list[str]) -> dict[str, Any]:
    """Return the options of a `jakiro` command, or raise an error if there are no such options.

    A folder that exists takes the place of the target's.
    """
    words = [str(ROOT) if word.endswith("/models/target") else word for word in words]
    group: Any = typer.main.get_command(app)
    command = group.commands[words[1]]
    options: dict[str, Any] = command.make_context(words[1], list(words[2:])).params
    return options


def _unit() -> str:
    return next(b for b in re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL) if "[Unit]" in b)


def _entry() -> list[str]:
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", CONTAINERFILE, re.MULTILINE)
    return list(json.loads(entry))


def test_the_container_starts_the_server_without_root() -> None:
    options = _options([*_entry(), *COMPOSE["command"]])
    assert (options["host"], options["port"]) == ("0.0.0.0", 8000)
    assert options["drain_seconds"] == DRAIN_SECONDS
    *_, last = re.findall(r"^USER (\d+):\d+$", CONTAINERFILE, re.MULTILINE)
    assert int(last) > 0
    assert "EXPOSE 8000" in CONTAINERFILE


def _health_check(server: Running) -> int:
    """Return the exit code of the health check of the container, at the port of a server."""
    (check,) = re.findall(r"HEALTHCHECK [^\n]*\\\n\s+CMD (.*)$", CONTAINERFILE, re.MULTILINE)
    program, flag, code = json.loads(check)
    assert (program, flag) == ("python", "-c")
    assert code.count(":8000/health") == 2
    here = code.replace(":8000/", f":{server.address[1]}/")
    run = subprocess.run([sys.executable, "-c", here], capture_output=True, check=False)
    return run.returncode


@pytest.mark.parametrize("has_tls", [False, True])
def test_the_health_check_asks_servers_with_and_without_tls(has_tls: bool, tmp_path: Path) -> None:
    with running(tiny_decoder(), **self_signed(tmp_path) if has_tls else {}) as server:
        assert _health_check(server) == 0
        server.server.service.is_draining = True
        assert _health_check(server) != 0


def test_the_image_contains_what_the_wheel_is_built_from() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    kept = [line.removeprefix("!/") for line in lines if line.startswith("!")]
    assert [name for name in kept if not (ROOT / name).exists()] == []
    assert {"moa", "jakiro", "inference", "training", "configs", "pyproject.toml"} <= set(kept)


def test_the_compose_example_gives_no_rights_away() -> None:
    assert COMPOSE["read_only"] is True
    assert COMPOSE["cap_drop"] == ["ALL"]
    assert COMPOSE["security_opt"] == ["no-new-privileges:true"]
    assert COMPOSE["ports"] == ["127.0.0.1:8000:8000"]
    assert int(COMPOSE["stop_grace_period"].removesuffix("s")) > DRAIN_SECONDS
    assert (ROOT / COMPOSE["build"]["dockerfile"]).exists()
    assert any(volume.endswith(":/cache") for volume in COMPOSE["volumes"])
    assert "JAKIRO_API_KEY:?" in COMPOSE["environment"]["JAKIRO_API_KEY"]


def test_the_command_in_the_page_starts_the_server() -> None:
    (block,) = (b for b in re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL) if "docker run" in b)
    words = shlex.split(block.partition("docker run")[2].replace("\\\n", " "))
    arguments = words[words.index("jakiro") + 1 :]
    assert _options([*_entry(), *arguments])["drafter"] == "lookup"
    assert int(words[words.index("--stop-timeout") + 1]) > DRAIN_SECONDS


def test_the_unit_starts_the_server() -> None:
    unit = dict(line.split("=", 1) for line in _unit().splitlines() if "=" in line)
    words = shlex.split(unit["ExecStart"])
    assert words[0].endswith("/jakiro")
    assert _options(words)["drain_seconds"] < int(unit["TimeoutStopSec"])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    file = tmp_path / "jakiro.service"
    file.write_text(_unit().replace("/opt/jakiro/bin/jakiro", sys.executable))
    command = ["systemd-analyze", "verify", "--man=no", str(file)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    own = [line for line in run.stderr.splitlines() if "jakiro" in line]
    assert own == []
    assert run.returncode == 0, run.stderr
