"""A run folder belongs to one run: it keeps drafters, and refuses other settings and data."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.interruptions import PowerCutError, interrupt_after
from helpers.models import tiny_llama
from helpers.training import curve, tiny_run, write_jsonl

from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError
from training.config import TrainSettings
from training.loop.run_folder import RunFolder, is_longer
from training.setup.preparation import prepare
from training.train import train

EACH_STEP: dict[str, Any] = {"every": 1, "num_prompts": 1, "max_new_tokens": 2}


def test_a_run_that_starts_again_keeps_its_best_drafter(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tiny_run(workshop, steps=4, evaluation=EACH_STEP, checkpoint={"every": None})
    taus = [1.2, 1.9, 1.5, 1.0]

    def measure(_: Any) -> dict[str, float]:
        if not taus:
            raise PowerCutError
        return {"tau": taus.pop()}

    with monkeypatch.context() as patched:
        patched.setattr("training.loop.run.scores_of", measure)
        with pytest.raises(PowerCutError):
            train(settings)
    assert _best(settings)["step"] == 2
    monkeypatch.setattr("training.loop.run.scores_of", lambda _: {"tau": 1.6})
    train(settings)
    assert _best(settings)["step"] == 2


def _best(settings: TrainSettings) -> dict[str, Any]:
    config = json.loads((settings.run_folder / "best" / "config.json").read_text())
    return dict(config["record"]["training"])


def test_a_finished_run_is_returned_as_it_is(trained_workshop: Path) -> None:
    settings = tiny_run(trained_workshop, steps=2)
    folder = settings.run_folder / "drafter"
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert train(settings) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_other_paths_and_another_use_of_memory_do_not_make_another_run(
    trained_workshop: Path, tmp_path: Path
) -> None:
    moved = shutil.move(trained_workshop, tmp_path / "moved")
    free: dict[str, Any] = {
        "batch": {"micro_batch_size": 4},
        "checkpoint": {"keep": 1, "keep_best": False},
        "evaluation": {"num_prompts": 1, "every": 1},
        "engine": {"zero_stage": 2, "offload_optimizer": True},
        "objective": {"chunk_size": 64},
    }
    again = tiny_run(Path(moved), steps=2, **free)
    assert train(again) == again.run_folder / "drafter"


@pytest.mark.parametrize("content", [None, '{"settings": {"steps"'])
def test_results_without_a_readable_record_are_refused(
    trained_workshop: Path, content: str | None
) -> None:
    settings = tiny_run(trained_workshop, steps=2, optimizer={"learning_rate": 0.5})
    record = settings.run_folder / "run.json"
    record.unlink() if content is None else record.write_text(content)
    with pytest.raises(ConfigError, match=r"record of the run in .* is missing or damaged.*remedy"):
        train(settings)


def test_sequences_that_were_filled_differently_make_another_run(trained_workshop: Path) -> None:
    whole = tiny_run(trained_workshop, steps=2, data={"split": "never"})
    with pytest.raises(ConfigError, match=r"sequences_filled_with differs.*split texts"):
        RunFolder(whole.run_folder).check(whole, prepare(whole).facts)


def test_a_folder_that_holds_only_the_settings_of_a_run_accepts_others(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(JakiroDrafter, "encode_memory", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(tiny_run(workshop, steps=2, seed=1))
    assert (workshop / "run" / "run.json").exists()
    settings = tiny_run(workshop, steps=2)
    train(settings)
    assert "seed: 0" in (settings.run_folder / "config.yaml").read_text()
    train(settings)


@pytest.mark.parametrize("is_finished", [True, False])
def test_a_run_continues_with_more_steps(
    workshop: Path, monkeypatch: pytest.MonkeyPatch, is_finished: bool
) -> None:
    kept: dict[str, Any] = {"checkpoint": {"every": 2}, "optimizer": {"schedule": "linear"}}
    shorter, longer = (tiny_run(workshop, steps=steps, **kept) for steps in (4, 6))
    if is_finished:
        train(shorter)
    else:
        interrupt_after(monkeypatch, 2)
        with pytest.raises(PowerCutError):
            train(shorter)
    before = curve(shorter)
    folder = train(longer)
    assert curve(longer)[: len(before)] == before
    assert len(curve(longer)) == 6
    steps = [JakiroDrafter.from_pretrained(folder).config.record["settings"]["steps"]]
    if is_finished:
        old = longer.run_folder / "drafter-after-4-steps"
        steps.append(JakiroDrafter.from_pretrained(old).config.record["settings"]["steps"])
    assert steps == ([6, 4] if is_finished else [6])
    with pytest.raises(ConfigError, match=r"steps differs\).*expected: 6; got: 4.*a higher value"):
        train(shorter)


@pytest.mark.parametrize("left", ["best", "checkpoints"])
def test_a_folder_with_a_drafter_or_a_checkpoint_accepts_no_other_settings(
    trained_workshop: Path, left: str
) -> None:
    for name in {"best", "drafter", "checkpoints"} - {left}:
        path = trained_workshop / "run" / name
        path.unlink() if path.is_symlink() else shutil.rmtree(path)
    with pytest.raises(ConfigError, match=r"seed differs"):
        train(tiny_run(trained_workshop, steps=2, seed=1))


@pytest.mark.parametrize("name", ["data", "target"])
def test_a_folder_with_a_run_on_other_data_or_another_target_is_refused(
    trained_workshop: Path, name: str
) -> None:
    if name == "data":
        write_jsonl(trained_workshop / "texts.jsonl", [{"text": "other words " * 9}] * 4)
    else:
        model = tiny_llama(vocab=300, eos_token_id=0)
        model.get_input_embeddings().weight.data += 1
        model.save_pretrained(trained_workshop / "target")
    with pytest.raises(ConfigError, match=rf"\({name}_fingerprint differs\)"):
        train(tiny_run(trained_workshop, steps=2))


def test_a_folder_in_which_another_process_trains_is_refused(workshop: Path) -> None:
    settings = tiny_run(workshop, steps=2)
    with (
        RunFolder(settings.run_folder).claim(settings, {}),
        pytest.raises(ConfigError, match="another process is training"),
    ):
        train(settings)


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ({"steps": 2}, {"steps": 3}, True),
        ({"steps": 3}, {"steps": 2}, False),
        ({"steps": 2}, {"steps": 2}, False),
        ({"epochs": 1.0}, {"epochs": 2.5}, True),
        ({"epochs": 1.0}, {"steps": 900}, False),
        ({"epochs": 1.0, "steps": 20}, {"epochs": 1.0}, True),
        ({"steps": 9, "minutes": 2.0}, {"steps": 9}, True),
        ({"steps": 9}, {"steps": 9, "minutes": 2.0}, False),
        ({"steps": 9, "minutes": 2.0}, {"steps": 8, "minutes": 3.0}, False),
        ({"steps": 2}, {"steps": 3, "seed": 1}, False),
    ],
)
def test_a_longer_run_has_only_higher_limits(
    before: dict[str, Any], now: dict[str, Any], expected: bool
) -> None:
    assert is_longer({"settings": before}, {"settings": now}) == expected
