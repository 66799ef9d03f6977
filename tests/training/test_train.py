"""Runs from data to drafter, in this process: learning, and refusal of bad input."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.families import tiny_family
from helpers.losslessness import greedy_by_transformers
from helpers.quick import mostly_slow
from helpers.training import curve, read_evaluations, tiny_run
from transformers import AutoTokenizer

from inference.decoder import SpeculativeDecoder
from jakiro.drafter import JakiroDrafter
from jakiro.errors import CheckpointError, ConfigError, DataError, JakiroError, PromptError
from jakiro.utils.settings import dump_settings
from training.config import EvaluationSettings
from training.loop.metrics import read_metrics
from training.setup.preparation import prepare
from training.train import main, train


def test_training_lowers_the_loss_and_the_drafter_decodes(workshop: Path) -> None:
    settings = tiny_run(workshop, steps=40, batch={"anchor_samples": 2}, evaluation={"every": 20})
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
    assert record["evaluation"]["validation"]["loss"] > 0
    assert record["provenance"]["versions"]["torch"]
    assert AutoTokenizer.from_pretrained(folder)("def")["input_ids"]
    assert (
        SpeculativeDecoder.from_pretrained(folder, tree="fixed")
        .generate("def", max_new_tokens=4)
        .text
    )
    evaluations = read_evaluations(settings.run_folder)
    assert [step for step, _ in evaluations] == [0, 20, 40]
    assert evaluations[-1][1] == record["evaluation"]
    assert list((settings.run_folder / "tensorboard").iterdir())


@pytest.mark.slow
def test_a_drafter_for_a_recurrent_target_reads_each_document_alone(workshop: Path) -> None:
    model = tiny_family("qwen3_5", vocab_size=300, eos_token_id=0)
    model.save_pretrained(workshop / "target")
    with pytest.raises(ConfigError, match=r"data\.split to alone"):
        prepare(tiny_run(workshop))
    settings = tiny_run(workshop, steps=2, data={"split": "alone"})
    sequences = prepare(settings).sequences
    assert len(sequences) > 1
    assert {int(sequences.sequence(index).documents.max()) for index in range(len(sequences))} == {
        0
    }
    decoder = SpeculativeDecoder.from_pretrained(train(settings), tree="fixed")
    output = decoder.generate("def add", max_new_tokens=8, temperature=0)
    prompt = output.sequences[0].tolist()[:-8]
    assert output.sequences[0].tolist() == greedy_by_transformers(model, prompt, 8)


def test_the_size_of_micro_batches_does_not_matter(workshop: Path) -> None:
    runs = [
        tiny_run(
            workshop,
            steps=6,
            batch={"micro_batch_size": size},
            evaluation={"num_prompts": 0},
            run_folder=str(workshop / f"run-{size}"),
        )
        for size in (1, 4)
    ]
    for settings in runs:
        train(settings)
    one_by_one, whole = map(curve, runs)
    assert one_by_one == pytest.approx(whole, abs=1e-4)


@pytest.mark.parametrize("target_dtype", mostly_slow(["fp32", "bf16"], quick=["bf16"]))
def test_half_precision_follows_the_curve_of_single_precision(
    workshop: Path, target_dtype: str
) -> None:
    runs = [
        tiny_run(
            workshop,
            steps=6,
            target={"dtype": target_dtype},
            engine=engine,
            evaluation={"num_prompts": 0},
            run_folder=str(workshop / f"run-{number}"),
        )
        for number, engine in enumerate(({}, {"dtype": "bf16"}, {"autocast": True}))
    ]
    for settings in runs:
        train(settings)
    single, half, mixed = map(curve, runs)
    assert half == pytest.approx(single, abs=0.01)
    assert mixed == pytest.approx(single, abs=0.01)
    assert mixed != single


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"data": {"paths": ["./missing.jsonl"]}}, DataError, "no file or folder"),
        ({"data": {"validation_size": 8}}, DataError, "validation_size leaves nothing"),
        ({"data": {"sequence_length": 1000}}, ConfigError, "longer than the target's context"),
        (
            {"batch": {"global_batch_size": 3}},
            ConfigError,
            r"batch\.global_batch_size cannot be divided evenly",
        ),
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


@pytest.mark.parametrize(("epochs", "expected"), [(0.1, 1), (1, 3), (2, 5), (2.5, 6)])
def test_a_number_of_epochs_is_turned_into_steps(
    workshop: Path, epochs: float, expected: int
) -> None:
    rising = {"warmup_steps": "auto"}
    settings = tiny_run(workshop, steps=None, epochs=epochs, optimizer=rising)
    assert len(prepare(settings).sequences) == 9  # a step takes 4 of them
    assert settings.with_steps(9).num_steps == expected
    shorter = settings.model_copy(update={"steps": 2})
    assert shorter.with_steps(9).num_steps == min(2, expected)


@pytest.mark.parametrize(
    ("every", "num_steps", "size", "expected"),
    [
        ("auto", 1000, 40, 100),
        ("auto", 50, 40, 20),  # 160 sequences are trained for 40 that are measured
        ("auto", 5, 2, 1),
        ("auto", 5, 40, None),
        ("auto", 1000, 0, None),
        (7, 9, 40, 7),
        (7, 9, 0, None),
        (None, 9, 40, None),
    ],
)
def test_automatic_evaluations_are_ten_if_training_takes_most_of_the_time(
    every: Any, num_steps: int, size: int, expected: int | None
) -> None:
    assert EvaluationSettings(every=every).interval(num_steps, 8, size) == expected
