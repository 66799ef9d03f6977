"""A run from data to drafter in this process: it learns, resumes, and refuses what is unusable."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.interruptions import PowerCutError, interrupt_after
from helpers.training import tiny_run, write_jsonl
from torch import distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

from inference.decoder import SpeculativeDecoder
from jakiro.drafter import JakiroDrafter
from jakiro.errors import CheckpointError, ConfigError, DataError, JakiroError, PromptError
from jakiro.settings import dump_settings
from training.config import TrainSettings
from training.journal import read_evaluations, read_metrics
from training.run_folder import RunFolder
from training.train import main, train


def curve(settings: TrainSettings) -> list[float]:
    """The recorded loss of each step."""
    return [line["loss"] for line in read_metrics(settings.run_folder) if "loss" in line]


def weights(settings: TrainSettings) -> dict[str, torch.Tensor]:
    return JakiroDrafter.from_pretrained(settings.run_folder / "drafter").state_dict()


def test_training_lowers_the_loss_and_the_drafter_decodes(workshop: Path) -> None:
    settings = tiny_run(workshop, steps=40, batch={"draws": 2}, evaluation={"every": 20})
    folder = train(settings)
    losses = curve(settings)
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    lines = [line for line in read_metrics(settings.run_folder) if "levels" in line]
    agreement = [line["levels"][0]["agreement"] for line in lines[::13]]
    assert agreement[0] < 0.05 < 0.1 < agreement[-1]
    drafter = JakiroDrafter.from_pretrained(folder)
    record = drafter.config.record
    assert record["training"]["step"] == 40
    assert record["training"]["tokens"] == sum(
        line["tokens"] for line in read_metrics(settings.run_folder) if "tokens" in line
    )
    assert record["evaluation"]["decoding"][0]["tau"] >= 1.0
    assert record["evaluation"]["held_out"]["loss"] > 0
    assert record["provenance"]["versions"]["torch"]
    assert AutoTokenizer.from_pretrained(folder)("def")["input_ids"]
    assert SpeculativeDecoder.from_pretrained(folder).generate("def", max_new_tokens=4).text
    evaluations = read_evaluations(settings.run_folder)
    assert [step for step, _ in evaluations] == [0, 20, 40]
    assert evaluations[-1][1] == record["evaluation"]
    assert list((settings.run_folder / "tensorboard").iterdir())


def test_nothing_but_our_own_bar_is_shown_while_steps_are_taken(
    workshop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny_run(workshop, steps=2, evaluation={"every": 1}))
    assert "Writing model shards" not in capsys.readouterr().err


def test_the_size_of_micro_batches_does_not_matter(workshop: Path) -> None:
    runs = [
        tiny_run(workshop, batch={"micro_batch": size}, run_folder=str(workshop / f"run-{size}"))
        for size in (1, 2, 4)
    ]
    for settings in runs:
        train(settings)
    whole, *others = map(curve, reversed(runs))
    for other in others:
        assert other == pytest.approx(whole, abs=1e-4)


@pytest.mark.parametrize("target_dtype", ["fp32", "bf16"])
def test_half_precision_follows_the_curve_of_single_precision(
    workshop: Path, target_dtype: str
) -> None:
    single, half = (
        tiny_run(
            workshop,
            target={"dtype": target_dtype},
            engine={"dtype": dtype},
            run_folder=str(workshop / dtype),
        )
        for dtype in ("fp32", "bf16")
    )
    train(single)
    train(half)
    assert curve(half) == pytest.approx(curve(single), abs=0.01)


def test_a_given_target_is_used_and_left_as_it_was(workshop: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(workshop / "target")
    before = {name: part.clone() for name, part in model.state_dict().items()}
    tokenizer = AutoTokenizer.from_pretrained(workshop / "target")
    settings = tiny_run(workshop, steps=2)
    train(settings, model=model, tokenizer=tokenizer)
    assert all(torch.equal(before[name], part) for name, part in model.state_dict().items())
    assert not dist.is_initialized()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_interrupted_run_goes_on_bit_by_bit(
    workshop: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    kind = {"kind": optimizer}
    whole = tiny_run(workshop, optimizer=kind, run_folder=str(workshop / "whole"))
    train(whole)
    halved = tiny_run(workshop, optimizer=kind, run_folder=str(workshop / "halved"))
    with monkeypatch.context() as patched:
        interrupt_after(patched, step=5)
        with pytest.raises(PowerCutError):
            train(halved)
    assert not (halved.run_folder / "drafter").exists()
    with (halved.run_folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "loss": 0.0}\n{"step": 7, "lo')  # of steps that were lost
    train(halved)
    assert curve(whole) == curve(halved)
    for name, part in weights(whole).items():
        assert torch.equal(part, weights(halved)[name]), name


def test_the_evaluation_before_the_first_step_is_there_once_and_only_if_there_are_several(
    workshop: Path,
) -> None:
    alone = tiny_run(workshop, steps=2, run_folder=str(workshop / "alone"))
    train(alone)
    assert [step for step, _ in read_evaluations(alone.run_folder)] == [2]
    settings = tiny_run(workshop, steps=2, evaluation={"every": 1})
    train(settings)
    whole = read_evaluations(settings.run_folder)
    assert [step for step, _ in whole] == [0, 1, 2]
    # As if it had died before its first checkpoint.
    for lost in ("drafter", "checkpoints"):
        shutil.rmtree(settings.run_folder / lost)
    train(settings)
    assert read_evaluations(settings.run_folder) == whole


def test_every_expert_has_its_candidates_and_their_acceptance(workshop: Path) -> None:
    settings = tiny_run(workshop, steps=20)
    train(settings)
    ((_, found),) = read_evaluations(settings.run_folder)
    (decoding,) = found["decoding"]
    proposed, shares = decoding["candidates_by_expert"], decoding["acceptance_by_expert"]
    assert len(proposed) == len(shares) == settings.drafter.bank.num_experts
    assert sum(proposed) > 0
    pairs = zip(proposed, shares, strict=True)
    assert all((share is None) == (count == 0) for count, share in pairs)
    assert all(0 <= share <= 1 for share in shares if share is not None)


def test_a_half_written_checkpoint_is_never_used(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tiny_run(workshop, run_folder=str(workshop / "whole"))
    train(whole)
    halved = tiny_run(workshop, run_folder=str(workshop / "halved"))
    with monkeypatch.context() as patched:
        interrupt_after(patched, step=5)
        with pytest.raises(PowerCutError):
            train(halved)
    good = halved.run_folder / "checkpoints" / "step-00000005"
    partial = good.with_name(".partial")
    shutil.copytree(good, partial)
    (partial / "state.json").unlink()
    train(halved)
    assert curve(whole) == curve(halved)


def test_a_run_that_begins_again_keeps_the_best_drafter_that_it_had(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tiny_run(workshop, evaluation={"every": 2}, checkpoint={"every": None})
    taus = [1.2, 1.9, 1.5, 1.0]

    def measure(_: Any) -> float:
        if not taus:
            raise PowerCutError
        return taus.pop()

    with monkeypatch.context() as patched:
        patched.setattr("training.run.mean_tau", measure)
        with pytest.raises(PowerCutError):
            train(settings)
    assert _best(settings)["step"] == 4
    monkeypatch.setattr("training.run.mean_tau", lambda _: 1.6)
    train(settings)
    assert _best(settings)["step"] == 4


def _best(settings: TrainSettings) -> dict[str, Any]:
    config = json.loads((settings.run_folder / "best" / "config.json").read_text())
    return dict(config["record"]["training"])


def test_a_damaged_checkpoint_is_reported(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tiny_run(workshop)
    with monkeypatch.context() as patched:
        interrupt_after(patched, step=5)
        with pytest.raises(PowerCutError):
            train(settings)
    for path in (settings.run_folder / "checkpoints").rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"cannot resume from .*step-00000005; .*remove that"):
        train(settings)


def test_only_the_latest_checkpoints_are_kept(workshop: Path) -> None:
    settings = tiny_run(workshop, checkpoint={"every": 2, "keep": 2})
    train(settings)
    kept = sorted(path.name for path in (settings.run_folder / "checkpoints").iterdir())
    assert kept == ["step-00000008", "step-00000010"]


def test_a_finished_run_is_returned_as_it_is(workshop: Path) -> None:
    settings = tiny_run(workshop, steps=2)
    folder = train(settings)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert train(settings) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_where_things_lie_and_what_they_cost_does_not_make_another_run(
    workshop: Path, tmp_path: Path
) -> None:
    settings = tiny_run(workshop, steps=2)
    train(settings)
    moved = shutil.move(workshop, tmp_path / "moved")
    free: dict[str, Any] = {
        "batch": {"micro_batch": 4},
        "checkpoint": {"keep": 1, "keep_best": False},
        "evaluation": {"num_prompts": 1, "every": 1},
        "engine": {"zero_stage": 2, "offload_optimizer": True},
        "objective": {"chunk_rows": 64},
    }
    again = tiny_run(Path(moved), steps=2, **free)
    assert train(again) == again.run_folder / "drafter"


def test_a_run_of_a_version_without_a_setting_goes_on_with_its_default(workshop: Path) -> None:
    settings = tiny_run(workshop, steps=2)
    train(settings)
    record = settings.run_folder / "run.json"
    identity = json.loads(record.read_text())
    del identity["settings"]["objective"]["token_loss"]
    identity["settings"]["engine"]["zero_stage"] = 1  # which once made another run
    record.write_text(json.dumps(identity))
    train(settings)
    with pytest.raises(ConfigError, match="token_loss differs"):
        train(tiny_run(workshop, steps=2, objective={"token_loss": "kl"}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, r"other settings \(seed differs\); expected: 0; got: 1"),
        ({"optimizer": {"learning_rate": 0.5}}, r"\(optimizer\.learning_rate differs\)"),
        ({"data": {"row_length": 32}}, r"\(data\.row_length differs\)"),
    ],
)
def test_a_folder_with_another_run_is_refused(
    workshop: Path, changes: dict[str, Any], message: str
) -> None:
    train(tiny_run(workshop, steps=2))
    with pytest.raises(ConfigError, match=message):
        train(tiny_run(workshop, **{"steps": 2, **changes}))


def test_a_folder_whose_run_left_nothing_but_its_settings_takes_others(
    workshop: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(JakiroDrafter, "remember", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(tiny_run(workshop, steps=2, seed=1))
    assert (workshop / "run" / "run.json").exists()
    caplog.set_level("INFO")
    settings = tiny_run(workshop, steps=2)
    train(settings)
    assert "becomes this one's (seed was 1, is 0)" in caplog.text
    assert "seed: 0" in (settings.run_folder / "config.yaml").read_text()
    train(settings)


@pytest.mark.parametrize("left", ["best", "drafter", "checkpoints"])
def test_a_folder_with_anything_that_a_run_has_learnt_takes_no_other_settings(
    workshop: Path, left: str
) -> None:
    train(tiny_run(workshop, steps=2))
    for name in {"best", "drafter", "checkpoints"} - {left}:
        path = workshop / "run" / name
        path.unlink() if path.is_symlink() else shutil.rmtree(path)
    with pytest.raises(ConfigError, match=r"seed differs"):
        train(tiny_run(workshop, steps=2, seed=1))


def test_a_folder_with_a_run_on_other_data_is_refused(workshop: Path) -> None:
    train(tiny_run(workshop, steps=2))
    write_jsonl(workshop / "texts.jsonl", [{"text": "other words " * 9}] * 4)
    with pytest.raises(ConfigError, match=r"\(data_fingerprint differs\)"):
        train(tiny_run(workshop, steps=2))


def test_a_folder_in_which_another_process_trains_is_refused(workshop: Path) -> None:
    settings = tiny_run(workshop, steps=2)
    with (
        RunFolder(settings.run_folder).claim(settings, {}),
        pytest.raises(ConfigError, match="another process is training"),
    ):
        train(settings)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"data": {"paths": ["./missing.jsonl"]}}, DataError, "no file or folder"),
        ({"data": {"held_out": 8}}, DataError, "held_out leaves nothing"),
        ({"data": {"row_length": 1000}}, ConfigError, "longer than the target's context"),
        ({"batch": {"rows": 3}}, ConfigError, r"batch\.rows cannot be shared out evenly"),
        ({"target": {"name_or_path": "./missing"}}, CheckpointError, "cannot load the tokenizer"),
        ({"evaluation": {"prompts": "./missing.jsonl"}}, PromptError, "cannot read the prompts"),
        ({"drafter": {"memory": {"layers": [3]}}}, ConfigError, "layers that the target does not"),
    ],
)
def test_unusable_inputs_are_refused_before_the_run_folder_is_touched(
    workshop: Path, changes: dict[str, Any], error: type[JakiroError], message: str
) -> None:
    settings = tiny_run(workshop, **changes)
    with pytest.raises(error, match=message):
        train(settings)
    assert not settings.run_folder.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": {"warmup_steps": 11}}, "warmup_steps at most as large as steps"),
        ({"engine": {"zero_stage": 4}}, r"'engine\.zero_stage'"),
        ({"optimizer": {"lr": 1}}, r"unknown key 'optimizer\.lr'"),
        ({"data": {"paths": []}}, r"'data\.paths'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    workshop: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_run(workshop, **changes)


def test_prompts_of_a_file_are_decoded(workshop: Path) -> None:
    write_jsonl(workshop / "prompts.jsonl", [{"text": "def add_one(first"}])
    settings = tiny_run(workshop, steps=2, evaluation={"prompts": str(workshop / "prompts.jsonl")})
    folder = train(settings)
    record = JakiroDrafter.from_pretrained(folder).config.record
    assert record["evaluation"]["decoding"][0]["tokens"] == 8


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "def " * 200}, "prompt 1 and its new tokens do not fit"),
        ({"turns": ["def"]}, "the tokenizer has no chat template"),
        ({"prompt": [300]}, "ids that the target does not have"),
    ],
)
def test_prompts_that_cannot_be_decoded_are_refused_before_the_first_step(
    workshop: Path, row: dict[str, Any], message: str
) -> None:
    write_jsonl(workshop / "prompts.jsonl", [row])
    settings = tiny_run(workshop, evaluation={"prompts": str(workshop / "prompts.jsonl")})
    with pytest.raises(PromptError, match=message):
        train(settings)
    assert not settings.run_folder.exists()


@pytest.fixture
def config_file(workshop: Path) -> Callable[..., str]:
    def write(**changes: Any) -> str:
        path = workshop / "train.yaml"
        path.write_text(dump_settings(tiny_run(workshop, **changes)))
        return str(path)

    return write


def test_the_command_line_trains(config_file: Callable[..., str], workshop: Path) -> None:
    config = config_file(steps=2)
    assert main(["--config", config, "--set", "log_every=2", "--local_rank=0"]) == 0
    assert (workshop / "run" / "drafter" / "config.json").exists()
    assert json.loads((workshop / "run" / "provenance.json").read_text())["versions"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=x", "unusable value for 'seed'"),
        ("sed=1", "unknown key 'sed'"),
        ("data.paths=[./none.jsonl]", "no file or folder"),
    ],
)
def test_bad_input_is_one_line_on_standard_error_and_exit_code_2(
    config_file: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    override: str,
    message: str,
) -> None:
    assert main(["--config", config_file(), "--set", override]) == 2
    captured = capsys.readouterr()
    *_, last = captured.err.strip().splitlines()
    assert last.startswith("error: ")
    assert message in last
    assert "Traceback" not in captured.err
    with pytest.raises(JakiroError):
        main(["--config", config_file(), "--set", override, "--debug"])
