"""`jakiro demo` passes its options on, and refuses unusable options before the demo begins."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import exit_code

Demo = Callable[..., None]


def test_the_demo_gets_its_options(
    plant_demo: Callable[[Demo], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t").mkdir()
    calls: list[dict[str, Any]] = []
    plant_demo(lambda store, **options: (store("figures"), calls.append(options)))
    assert exit_code("demo", "--preset", "small") == 0
    assert not Path("f.json").exists()
    words = ["--preset", "smoke", "--cache-dir", "c", "--device", "cpu", "--target", "t"]
    assert exit_code("demo", *words, "--json", "f.json") == 0
    assert Path("f.json").read_text() == "figures"
    assert calls == [
        {"preset": "small", "device": "auto", "target": None, "cache_dir": None},
        {"preset": "smoke", "device": "cpu", "target": "t", "cache_dir": Path("c")},
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
    assert exit_code("demo") == 0
    assert calls == [(None, "auto")] if is_available else ["small"]


def test_an_unwritable_cache_folder_is_refused_before_a_model_is_downloaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("jakiro.demo.chat_model.fetch_model")  # a download would fail
    (tmp_path / "file").write_text("in the way")
    assert exit_code("demo", "--cache-dir", str(tmp_path / "file" / "cache")) == 2
    assert capsys.readouterr().err.startswith("error: cannot write into the folder")


def test_a_target_that_does_not_exist_is_refused_before_anything_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--target", str(tmp_path / "nowhere"), "--cache-dir", str(tmp_path))
    assert exit_code("demo", *words) == 2
    assert "error: cannot load the target" in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert exit_code("demo", "--device", "cuda", "--cache-dir", str(tmp_path)) == 2
    assert "error: there is no GPU" in capsys.readouterr().err


def test_figures_are_not_written_to_a_file_named_like_standard_output(
    plant_demo: Callable[[Demo], None], capsys: pytest.CaptureFixture[str]
) -> None:
    plant_demo(lambda **_: pytest.fail("the demo has begun"))
    assert exit_code("demo", "--preset", "smoke", "--json", "-") == 2
    assert "--json cannot write the figures to standard output" in capsys.readouterr().err


@pytest.mark.parametrize("preset", ["chat", "smoke"])
def test_a_file_that_exists_is_refused_before_any_work(
    plant_demo: Callable[[Demo], None],
    preset: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plant_demo(lambda **_: pytest.fail("the demo has begun"))
    monkeypatch.delattr("jakiro.demo.chat_model.fetch_model")  # a download would fail
    old = tmp_path / "old.json"
    old.write_text("mine")
    assert exit_code("demo", "--preset", preset, "--json", str(old)) == 2
    assert "choose another name for --json" in capsys.readouterr().err
    assert old.read_text() == "mine"
