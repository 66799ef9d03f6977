"""The command line answers fast and reports every mistake of a caller in one line."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import jakiro
from jakiro.cli import main
from jakiro.errors import ConfigError, JakiroError

PROGRAMS = (
    *("generate", "demo", "aded", "train", "features", "plot", "ablate"),
    *("bench", "verify", "throughput", "profile", "prepare", "regenerate", "data"),
)

Demo = Callable[..., None]


@pytest.fixture
def plant_demo(monkeypatch: pytest.MonkeyPatch) -> Callable[[Demo], None]:
    """A function that replaces the demo, which takes minutes, with another function."""

    def plant(run_demo: Demo) -> None:
        module = ModuleType("jakiro.demo.pipeline")
        module.run_demo = run_demo  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "jakiro.demo.pipeline", module)

    return plant


def run(*words: str) -> object:
    """Run the command line in this process and return its exit code."""
    with pytest.raises(SystemExit) as exit_:
        main(words)
    return exit_.value.code or 0


def raising(error: BaseException) -> Demo:
    def run_demo(**_options: Any) -> None:
        raise error

    return run_demo


def test_the_demo_gets_its_options(
    plant_demo: Callable[[Demo], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    calls: list[dict[str, Any]] = []
    plant_demo(lambda **options: calls.append(options))
    assert run("demo", "--preset", "small") == 0
    words = ["--preset", "smoke", "--cache-dir", "c", "--device", "cpu", "--target", "t"]
    assert run("demo", *words, "--json", "f.json") == 0
    places = [{"cache_dir": None, "figures": None}, {"cache_dir": Path("c")}]
    assert calls == [
        {"preset": "small", "device": "auto", "target": None, **places[0]},
        {"preset": "smoke", "device": "cpu", "target": "t", **places[1], "figures": Path("f.json")},
    ]


@pytest.mark.parametrize("is_available", [True, False])
def test_without_options_the_demo_has_a_chat_model_if_there_is_one(
    plant_demo: Callable[[Demo], None], monkeypatch: pytest.MonkeyPatch, is_available: bool
) -> None:
    calls: list[Any] = []
    plant_demo(lambda **options: calls.append(options["preset"]))
    monkeypatch.setattr("jakiro.demo.chat_model.is_available", lambda: is_available)
    monkeypatch.setattr(
        "jakiro.demo.chat_model.run_chat_demo", lambda *args, **_: calls.append(args)
    )
    assert run("demo") == 0
    assert calls == [(None, "auto")] if is_available else ["small"]


def test_a_mistake_of_the_caller_is_one_line_without_traceback(
    plant_demo: Callable[[Demo], None], capsys: pytest.CaptureFixture[str]
) -> None:
    plant_demo(raising(ConfigError("bad\n  value", expected="good", got="bad", remedy="be good")))
    assert run("demo", "--preset", "small") == 2
    captured = capsys.readouterr()
    assert captured.err == "error: bad value; expected: good; got: bad; remedy: be good\n"
    assert not captured.out


@pytest.mark.parametrize(
    "words", [("--debug", "demo", "--preset=small"), ("demo", "--preset=small", "--debug")]
)
def test_debug_shows_the_traceback_before_the_line(
    words: tuple[str, ...],
    plant_demo: Callable[[Demo], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    plant_demo(raising(JakiroError("bad")))
    assert run(*words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1] == "error: bad"


def test_an_interruption_is_reported_in_one_word(
    plant_demo: Callable[[Demo], None], capsys: pytest.CaptureFixture[str]
) -> None:
    plant_demo(raising(KeyboardInterrupt()))
    assert run("demo", "--preset", "small") == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_fault_of_the_program_is_not_hidden(plant_demo: Callable[[Demo], None]) -> None:
    plant_demo(raising(ZeroDivisionError("ours")))
    with pytest.raises(ZeroDivisionError):
        main(["demo", "--preset", "small"])


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((), "Missing command"),
        (("dmeo",), "No such command 'dmeo'"),
        (("--color",), "No such option"),
        (("demo", "--preset", "huge"), "'--preset'"),
        (("demo", "--device"), "'--device'"),
        (("demo", "more"), "unexpected extra argument"),
    ],
)
def test_a_malformed_command_is_one_line_with_a_remedy(
    words: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert complaint in line
    assert line.endswith("; remedy: see `jakiro --help`")


def test_values_among_other_lines_do_not_go_to_standard_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("throughput", "--config", "nowhere.yaml", "--out", "-") == 2
    assert "--out cannot write the measured values to standard output" in capsys.readouterr().err


def test_the_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"jakiro {jakiro.__version__}\n"


def test_help_lists_every_program_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    shown = [line.strip("│ ") for line in capsys.readouterr().out.splitlines()]
    for program in PROGRAMS:
        (line,) = (line for line in shown if line.startswith(f"{program} "))
        assert line.removeprefix(program).strip()
    for group in ("Decode", "Train", "Measure", "Data"):
        assert any(line.startswith(f"╭─ {group} ") for line in shown)


@pytest.mark.parametrize(
    "words",
    [
        *(("data", name) for name in ("texts", "prompts", "small-lm")),
        *(("profile", name) for name in ("engine", "automatic", "rounding")),
        ("ablate",),
        ("throughput",),
        ("aded", "build"),
    ],
    ids=" ".join,
)
def test_every_program_describes_its_options(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words, "--help") == 0
    assert f"Usage: jakiro {' '.join(words)} [OPTIONS]" in capsys.readouterr().out


def test_help_does_not_wait_for_torch() -> None:
    program = (
        "import sys; from jakiro.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
