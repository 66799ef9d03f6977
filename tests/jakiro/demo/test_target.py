"""The demo's toy target: recipe, interruption, and cache."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from rich.progress import Progress
from transformers import AutoModelForCausalLM, AutoTokenizer

from jakiro.demo.corpus import Corpus, SourceFile
from jakiro.demo.presets import PRESETS, TargetRecipe
from jakiro.demo.pretraining import Pretraining, learning_rate_factor
from jakiro.demo.target import RECORD_NAME, is_intact, read_record, train_target
from jakiro.errors import DataError

TINY = PRESETS["smoke"].model_copy(
    update={
        "name": "tiny",
        "target": TargetRecipe(
            vocab_size=300,
            num_layers=2,
            hidden_size=16,
            num_heads=2,
            num_kv_heads=1,
            head_dim=8,
            intermediate_size=32,
            sequence_length=16,
            sequences_per_step=4,
            num_steps=12,
            warmup_steps=2,
            num_validation_sequences=10,
        ),
    }
)


class Interrupted(Exception):
    """An exception that stands for Ctrl-C."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread, since more threads only slow a tiny model down on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def corpus() -> Corpus:
    files = tuple(
        SourceFile(f"f{i}.py", f"def add_{i}(left, right):\n    return left + right * {i}\n" * 4)
        for i in range(30)
    )
    return Corpus(train=files[:20], dev=files[20:25], test=files[25:], fingerprint="0" * 64)


@pytest.fixture
def progress() -> Progress:
    return Progress(disable=True)


@pytest.fixture
def interrupt_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A function that interrupts the next training run after a number of steps."""
    advance = Pretraining.advance

    def plan(num_steps: int) -> None:
        steps = count()

        def advance_or_stop(run: Pretraining) -> float:
            if next(steps) == num_steps:
                monkeypatch.setattr(Pretraining, "advance", advance)
                raise Interrupted
            return advance(run)

        monkeypatch.setattr(Pretraining, "advance", advance_or_stop)

    return plan


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder).state_dict())


def assert_same_weights(first: Path, second: Path) -> None:
    expected, got = weights_of(first), weights_of(second)
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_target_learns_and_is_loaded_by_transformers(
    corpus: Corpus, progress: Progress, tmp_path: Path
) -> None:
    folder = train_target(TINY, corpus, tmp_path, progress)
    record = read_record(folder)
    assert record.validation_loss < torch.log(torch.tensor(300.0))
    assert record.tokens == 12 * 4 * 16
    assert record.recipe == TINY.target
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer("def add_1(", return_tensors="pt")["input_ids"]
    assert model(ids).logits.shape == (1, ids.shape[1], 300)
    assert model.config.eos_token_id == tokenizer.eos_token_id == tokenizer.pad_token_id


def test_second_call_trains_nothing(
    corpus: Corpus, progress: Progress, tmp_path: Path, interrupt_at: Callable[[int], None]
) -> None:
    first = train_target(TINY, corpus, tmp_path, progress)
    interrupt_at(0)
    assert train_target(TINY, corpus, tmp_path, progress) == first


def test_interrupted_training_resumes_to_the_same_weights(
    corpus: Corpus, progress: Progress, tmp_path: Path, interrupt_at: Callable[[int], None]
) -> None:
    straight = train_target(TINY, corpus, tmp_path / "straight", progress)
    interrupt_at(7)
    with pytest.raises(Interrupted):
        train_target(TINY, corpus, tmp_path / "cut", progress, seconds_between_checkpoints=0.0)
    interrupt_at(6)  # a new start would need twelve steps and would be interrupted
    resumed = train_target(TINY, corpus, tmp_path / "cut", progress)
    assert_same_weights(straight, resumed)
    assert [path.name for path in (tmp_path / "cut").iterdir() if path.is_dir()] == [resumed.name]


def test_training_starts_again_from_a_damaged_checkpoint(
    corpus: Corpus,
    progress: Progress,
    tmp_path: Path,
    interrupt_at: Callable[[int], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    straight = train_target(TINY, corpus, tmp_path / "straight", progress)
    interrupt_at(7)
    with pytest.raises(Interrupted):
        train_target(TINY, corpus, tmp_path / "cut", progress, seconds_between_checkpoints=0.0)
    (checkpoint,) = (tmp_path / "cut").glob(".*.partial/training.pt")
    checkpoint.write_bytes(checkpoint.read_bytes()[:-1000])
    resumed = train_target(TINY, corpus, tmp_path / "cut", progress)
    assert_same_weights(straight, resumed)
    assert "training starts again" in caplog.text


def test_interruption_leaves_nothing_that_looks_like_a_target(
    corpus: Corpus, progress: Progress, tmp_path: Path, interrupt_at: Callable[[int], None]
) -> None:
    interrupt_at(7)
    with pytest.raises(Interrupted):
        train_target(TINY, corpus, tmp_path, progress)
    assert not list(tmp_path.glob("target-*"))


def test_an_interruption_while_saving_is_repaired(
    corpus: Corpus, progress: Progress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("jakiro.demo.target.mean_loss", raise_interrupted)
        with pytest.raises(Interrupted):
            train_target(TINY, corpus, tmp_path, progress)
    assert not list(tmp_path.glob("target-*"))
    assert is_intact(train_target(TINY, corpus, tmp_path, progress))


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", RECORD_NAME])
@pytest.mark.parametrize("damage", ["missing", "half"])
def test_half_written_target_is_rebuilt(
    name: str, damage: str, corpus: Corpus, progress: Progress, tmp_path: Path
) -> None:
    folder = train_target(TINY, corpus, tmp_path, progress)
    path = folder / name
    content = path.read_bytes()
    path.unlink()
    if damage == "half":
        path.write_bytes(content[: len(content) // 2])
    assert not is_intact(folder)
    assert train_target(TINY, corpus, tmp_path, progress) == folder
    assert is_intact(folder)


def test_another_recipe_or_corpus_is_another_target(
    corpus: Corpus, progress: Progress, tmp_path: Path
) -> None:
    other_corpus = replace(corpus, fingerprint="1" * 64)
    other_recipe = TINY.model_copy(update={"target": TINY.target.model_copy(update={"seed": 1})})
    folders = {
        train_target(TINY, corpus, tmp_path, progress),
        train_target(TINY, other_corpus, tmp_path, progress),
        train_target(other_recipe, corpus, tmp_path, progress),
    }
    assert len(folders) == 3


def test_two_simultaneous_calls_train_one_target(
    corpus: Corpus, progress: Progress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds = []
    advance = Pretraining.advance

    def counted(run: Pretraining) -> float:
        builds.append(run)
        return advance(run)

    monkeypatch.setattr(Pretraining, "advance", counted)
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(train_target, TINY, corpus, tmp_path, progress) for _ in range(2)]
    assert calls[0].result() == calls[1].result()
    assert len(builds) == TINY.target.num_steps


def test_text_shorter_than_a_batch_is_a_clear_error(
    corpus: Corpus, progress: Progress, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="too few tokens"):
        train_target(TINY, replace(corpus, train=corpus.train[:1]), tmp_path, progress)


def test_learning_rate_rises_stays_and_falls() -> None:
    recipe = TINY.target.model_copy(update={"num_steps": 10, "warmup_steps": 2, "decay_share": 0.5})
    factors = [learning_rate_factor(recipe, step) for step in range(10)]
    assert factors == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])


def test_every_preset_names_itself() -> None:
    assert {name: preset.name for name, preset in PRESETS.items()} == {
        "smoke": "smoke",
        "small": "small",
    }


def raise_interrupted(*_: object) -> float:
    raise Interrupted
