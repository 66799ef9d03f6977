"""`jakiro import` and `jakiro export` of EAGLE-3: the right layers, training, and back again."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.commands import exit_code
from helpers.families import tiny_family
from helpers.models import tiny_llama, tiny_settings
from helpers.published import (
    PublishedEagle3,
    eagle3_config,
    eagle3_weights,
    fitted,
    greedy_texts,
    save_published,
)
from helpers.tokenizers import tiny_tokenizer
from helpers.training import TEXTS, write_jsonl

from jakiro.config import config_for
from jakiro.drafter import JakiroDrafter
from jakiro.exchange.checkpoint import read_checkpoint
from jakiro.target.adapter import TargetAdapter
from jakiro.target.record import record_target
from jakiro.utils.pretrained import load_causal_lm
from jakiro.utils.settings import load_settings
from training.config import TrainSettings
from training.train import train

LAYERS = (2, 4, 5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target and training data."""
    folder = tmp_path_factory.mktemp("published")
    tokenizer = tiny_tokenizer()
    vocab = len(tokenizer)
    model = tiny_llama(vocab=vocab, eos_token_id=0, num_hidden_layers=7)
    model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    write_jsonl(folder / "texts.jsonl", ({"text": text} for text in TEXTS))
    return folder


@pytest.fixture(scope="module")
def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a head that is fitted to the prompts of the folder."""
    model = load_causal_lm(folder / "target")
    vocab = model.config.vocab_size
    prompts = torch.randint(0, vocab, (5, 4), generator=torch.Generator().manual_seed(0))
    write_jsonl(folder / "prompts.jsonl", ({"prompt": ids} for ids in prompts.tolist()))
    published = PublishedEagle3(eagle3_weights(200, vocab), model, LAYERS)
    return fitted(published, greedy_texts(model, prompts), steps=120)


def _import(folder: Path, weights: Any, out: Path, **config: Any) -> JakiroDrafter:
    head = out.with_name(f"{out.name}-head")
    values = eagle3_config(300, 200, **config)
    save_published(head, weights, values)
    options = ("--target", folder / "target", "--prompts", folder / "prompts.jsonl")
    assert exit_code("import", head, *options, "--out", out, "--device", "cpu") == 0
    return JakiroDrafter.from_pretrained(out)


@pytest.mark.slow
@pytest.mark.parametrize("ids", [LAYERS, (1, 3, 4)])
def test_the_convention_of_layer_indices_that_agrees_better_is_chosen_and_recorded(
    ids: tuple[int, ...], folder: Path, weights: Any, tmp_path: Path
) -> None:
    config = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}
    drafter = _import(folder, weights, tmp_path / "drafter", **config)
    assert drafter.config.settings.trunk.fusion_layers == LAYERS
    measured = drafter.config.record["import"]["measured"]
    (other,) = measured["alternatives"].values()
    assert measured["agreement"] > other


@pytest.mark.slow
def test_an_imported_head_is_trained_further_and_exported(
    folder: Path, weights: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = _import(folder, weights, tmp_path / "drafter", layer_ids=LAYERS)
    changes = [
        f"data.paths=[{folder / 'texts.jsonl'}]",
        f"data.cache_folder={tmp_path / 'cache'}",
        *("data.sequence_length=48", "data.validation_size=2", "evaluation.num_prompts=0"),
        *("batch.global_batch_size=4", "batch.micro_batch_size=2", "steps=3"),
        *("optimizer.learning_rate=1e-3", "optimizer.warmup_steps=0"),
        *("checkpoint.keep_best=false", f"run_folder={tmp_path}/run"),
    ]
    settings = load_settings(TrainSettings, tmp_path / "drafter" / "train.yaml", changes)
    assert settings.drafter.trunk.ttt_steps == 4
    trained = train(settings)
    after = JakiroDrafter.from_pretrained(trained)
    for name in ("own_head.weight", "head_norm.weight", "feature_encoder.output.weight"):
        assert not torch.equal(after.state_dict()[name], before.state_dict()[name]), name
    capsys.readouterr()
    for layout in ("eagle3", "speculators"):
        out = tmp_path / layout
        assert exit_code("export", trained, "--to", layout, "--out", out) == 0
        printed = capsys.readouterr().out
        assert "vllm serve" in printed
        checkpoint = read_checkpoint(out)
        assert torch.equal(checkpoint.tensor("lm_head.weight"), after.own_head.weight)
        config = json.loads((out / "config.json").read_text())
        assert config["eagle_aux_hidden_state_layer_ids"] == list(LAYERS)
        assert "3 optimizer steps" in (out / "README.md").read_text()
    assert exit_code("export", trained, "--to", "eagle3", "--out", tmp_path / "eagle3") == 2
    assert "already exists" in capsys.readouterr().err
    tiny_llama(hidden_size=64).save_pretrained(tmp_path / "wide")
    tiny_family("gemma3").save_pretrained(tmp_path / "gemma")
    for target, message in (("wide", "hidden size differs"), ("gemma", "of the Gemma family")):
        words = ("--to", "eagle3", "--out", out / "x", "--target", tmp_path / target)
        assert exit_code("export", trained, *words) == 2
        assert message in capsys.readouterr().err


def test_a_drafter_of_another_architecture_is_exported_for_the_plugin(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = TargetAdapter(load_causal_lm(folder / "target"))
    trunk = {"kind": "hybrid", "first_position": False}
    config = config_for(
        tiny_settings(trunk=trunk), record_target(target.spec, str(folder / "target"))
    )
    torch.manual_seed(0)
    JakiroDrafter(config).save_pretrained(tmp_path / "drafter")
    out = tmp_path / "exported"
    assert exit_code("export", tmp_path / "drafter", "--to", "vllm", "--out", out) == 0
    printed = capsys.readouterr().out
    assert "dropped: parallel levels" in printed
    assert f"vllm serve {folder / 'target'} --speculative-config '{{" in printed
    assert (out / "model.safetensors").is_file()
    options = ("--to", "vllm", "--out", tmp_path / "other")
    other = tiny_llama(vocab=target.spec.vocab_size, seed=5, num_hidden_layers=7)
    other.save_pretrained(tmp_path / "target")
    assert exit_code("export", tmp_path / "drafter", *options, "--target", tmp_path / "target") == 2
    assert "fingerprint differs" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
