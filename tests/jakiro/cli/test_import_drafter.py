"""`jakiro import`: a published drafter is shown, measured, written, used and trained further."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.commands import exit_code
from helpers.losslessness import greedy_by_transformers
from helpers.models import tiny_llama
from helpers.published import (
    PublishedDrafter,
    eagle_config,
    eagle_weights,
    fitted,
    greedy_texts,
    save_published,
)
from helpers.published_moa import PublishedMoa, moa_config, moa_weights
from helpers.published_moa import fitted as fitted_moa
from helpers.tokenizers import tiny_tokenizer
from helpers.training import TEXTS, write_jsonl

from inference.benchmark.agreement import measure_agreement
from inference.decoder import SpeculativeDecoder
from jakiro.drafter import JakiroDrafter
from jakiro.utils.pretrained import load_causal_lm
from jakiro.utils.settings import load_settings
from training.config import TrainSettings
from training.train import train

Import = Callable[..., int]
TAIL = 1  # layers of the target that run after the drafter of Mixture of Attentions


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, a fitted head, a random head, prompts and training data."""
    folder = tmp_path_factory.mktemp("published")
    tokenizer = tiny_tokenizer()
    model = tiny_llama(vocab=len(tokenizer), eos_token_id=0)
    model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    prompts = torch.randint(0, len(tokenizer), (5, 4), generator=torch.Generator().manual_seed(0))
    config = eagle_config(len(tokenizer))
    save_published(folder / "random", eagle_weights(), config)
    published = PublishedDrafter(eagle_weights(), model)
    weights = fitted(published, greedy_texts(model, prompts))
    save_published(folder / "head", weights, config, "bin")
    write_jsonl(folder / "prompts.jsonl", ({"prompt": ids} for ids in prompts.tolist()))
    write_jsonl(folder / "texts.jsonl", ({"text": text} for text in TEXTS))
    return folder


@pytest.fixture(scope="module")
def moa(folder: Path) -> str:
    """A fitted head of another family in the folder."""
    model = load_causal_lm(folder / "target")
    lines = (folder / "prompts.jsonl").read_text().splitlines()
    prompts = torch.tensor([json.loads(line)["prompt"] for line in lines])
    weights = fitted_moa(PublishedMoa(moa_weights(), model, TAIL), greedy_texts(model, prompts))
    save_published(folder / "moa", weights, moa_config(vocab=model.config.vocab_size))
    return "moa"


def _convert(folder: Path, drafter: Path, head: str, *words: str) -> int:
    """Import a head, and return the exit code."""
    paths = {"target": folder / "target", "prompts": folder / "prompts.jsonl", "out": drafter}
    options = [part for name, path in paths.items() for part in (f"--{name}", str(path))]
    options += ["--device", "cpu", "--max-new-tokens", "12"]
    return exit_code("import", folder / head, *options, *words)


@pytest.fixture
def convert(folder: Path, tmp_path: Path) -> Import:
    """A function that imports a head into a folder of the test, and returns the exit code."""
    return partial(_convert, folder, tmp_path / "drafter")


def test_an_imported_drafter_is_recorded_and_decodes_exactly(
    convert: Import, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert("head") == 0
    printed = capsys.readouterr().out
    assert "family: EAGLE-1, EAGLE-2 or HASS" in printed
    out = tmp_path / "drafter"
    drafter = JakiroDrafter.from_pretrained(out)
    record = drafter.config.record["import"]
    assert record["source"] == str(folder / "head")
    assert record["files"].keys() == {"config.json", "pytorch_model.bin"}
    assert record["measured"]["agreement"] > record["measured"]["floor"]
    assert record["measured"]["tau"] > 1.5
    decoder = SpeculativeDecoder.from_pretrained(out, tree="fixed")
    prompt = json.loads((folder / "prompts.jsonl").read_text().splitlines()[0])["prompt"]
    output = decoder.generate(prompt, max_new_tokens=20, temperature=0)
    assert output.stats.tau > 1.5
    expected = greedy_by_transformers(decoder.target.model, prompt, 20)
    assert output.sequences[0].tolist() == expected


@pytest.mark.slow
def test_the_number_of_tail_layers_that_agrees_best_is_chosen_and_recorded(
    convert: Import, moa: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(moa) == 0
    assert "family: Mixture of Attentions" in capsys.readouterr().out
    drafter = JakiroDrafter.from_pretrained(tmp_path / "drafter")
    assert drafter.config.settings.tail_layers == TAIL
    measured = drafter.config.record["import"]["measured"]
    assert measured["tau"] > 1.5
    assert measured["alternatives"].keys() == {"tail_layers 0", "tail_layers 2"}
    assert all(other < measured["agreement"] for other in measured["alternatives"].values())


def test_a_dry_run_needs_no_target_and_writes_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("import", folder / "random", "--dry-run") == 0
    printed = capsys.readouterr().out
    assert "experts.down <- layers.0.mlp.down_proj.weight (transposed)" in printed
    assert "first_position: false" in printed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.usefixtures("moa")
@pytest.mark.parametrize("head", ["head", "moa"])
def test_an_imported_drafter_is_trained_further(
    head: str, convert: Import, folder: Path, tmp_path: Path
) -> None:
    assert convert(head) == 0
    imported = tmp_path / "drafter"
    changes = [
        f"data.paths=[{folder / 'texts.jsonl'}]",
        f"data.cache_folder={tmp_path / 'cache'}",
        *("data.sequence_length=48", "data.validation_size=2", "evaluation.num_prompts=0"),
        *("batch.global_batch_size=4", "batch.micro_batch_size=2", "steps=1"),
        *(
            "optimizer.learning_rate=1e-12",
            "optimizer.warmup_steps=0",
            f"run_folder={tmp_path}/run",
        ),
    ]
    (tmp_path / "my.yaml").write_text(f"extends: {imported / 'train.yaml'}\n")
    settings = load_settings(TrainSettings, tmp_path / "my.yaml", changes)
    trained = JakiroDrafter.from_pretrained(train(settings))
    model = load_causal_lm(folder / "target")
    lines = (folder / "prompts.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    before, after = (
        measure_agreement(model, drafter, None, prompts, max_new_tokens=20)
        for drafter in (JakiroDrafter.from_pretrained(imported), trained)
    )
    assert after == before
