"""`jakiro import` and `jakiro export` of block drafters, and their training in between."""

from pathlib import Path

import pytest
import torch
from helpers.commands import exit_code
from helpers.imports import converted
from helpers.losslessness import greedy_by_transformers
from helpers.models import tiny_llama
from helpers.published import greedy_texts, save_published
from helpers.published_blocks import RANK, block_config, block_weights, dspark_config, fit_block
from helpers.tokenizers import tiny_tokenizer
from helpers.training import TEXTS, write_jsonl

from inference.decoder import SpeculativeDecoder
from jakiro.drafter import JakiroDrafter
from jakiro.exchange.checkpoint import read_checkpoint
from jakiro.exchange.dflash import export_dflash
from jakiro.exchange.eagle3_export import ServedTarget
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.pretrained import load_causal_lm
from jakiro.utils.settings import load_settings
from training.config import TrainSettings
from training.train import train

PROMPTS = [[5, 9, 2, 7], [11, 3, 8, 30], [40, 41, 4, 6]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, training data, and fitted drafters of DFlash and DSpark."""
    folder = tmp_path_factory.mktemp("published")
    tokenizer = tiny_tokenizer()
    vocab = len(tokenizer)
    model = tiny_llama(vocab=vocab, eos_token_id=0, num_hidden_layers=5)
    model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    write_jsonl(folder / "texts.jsonl", ({"text": text} for text in TEXTS))
    write_jsonl(folder / "prompts.jsonl", ({"prompt": ids} for ids in PROMPTS))
    config = block_config(vocab)
    head = save_published(folder / "random", block_weights(vocab=vocab), config)
    drafter = fit_block(
        converted(head, model), TargetAdapter(model), greedy_texts(model, torch.tensor(PROMPTS))
    )
    weights = export_dflash(drafter, ServedTarget("", "", 128)).weights
    save_published(folder / "dflash", weights, config)
    tables = block_weights(rank=RANK, vocab=vocab)
    zeros = {name: 0 * part for name, part in tables.items() if "markov" in name}
    save_published(
        folder / "dspark", weights | zeros, dspark_config(vocab, sample_from_anchor=False)
    )
    return folder


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_block_drafter_is_imported_decodes_exactly_and_is_exported(
    kind: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--target", folder / "target", "--prompts", folder / "prompts.jsonl")
    words = (*words, "--device", "cpu", "--max-new-tokens", "12", "--out", tmp_path / "drafter")
    assert exit_code("import", folder / kind, *words) == 0
    name = {"dflash": "DFlash", "dspark": "DSpark"}[kind]
    assert f"family: {name}, layout of z-lab" in capsys.readouterr().out
    measured = JakiroDrafter.from_pretrained(tmp_path / "drafter").config.record["import"]
    assert measured["measured"]["chain_tau"] > 2
    decoder = SpeculativeDecoder.from_pretrained(tmp_path / "drafter", tree="fixed")
    output = decoder.generate(PROMPTS[0], temperature=0.0, max_new_tokens=20)
    expected = greedy_by_transformers(load_causal_lm(folder / "target"), PROMPTS[0], 20)
    assert output.sequences[0].tolist() == expected
    out = tmp_path / "exported"
    assert exit_code("export", tmp_path / "drafter", "--to", "dflash", "--out", out) == 0
    assert f'"method": "{kind}"' in capsys.readouterr().out
    given, again = read_checkpoint(folder / kind), read_checkpoint(out)
    for name in given.tensors:
        assert torch.equal(again.tensor(name), given.tensor(name)), name


@pytest.mark.slow
def test_an_imported_block_is_trained_further(folder: Path, tmp_path: Path) -> None:
    words = ("--target", folder / "target", "--prompts", folder / "prompts.jsonl")
    words = (*words, "--device", "cpu", "--max-new-tokens", "12", "--out", tmp_path / "drafter")
    assert exit_code("import", folder / "dflash", *words) == 0
    changes = [
        f"data.paths=[{folder / 'texts.jsonl'}]",
        f"data.cache_folder={tmp_path / 'cache'}",
        *("data.sequence_length=48", "data.validation_size=2", "evaluation.num_prompts=0"),
        *("batch.global_batch_size=4", "batch.micro_batch_size=2", "steps=2"),
        *("optimizer.learning_rate=1e-3", "optimizer.warmup_steps=0"),
        *("checkpoint.keep_best=false", f"run_folder={tmp_path}/run"),
    ]
    settings = load_settings(TrainSettings, tmp_path / "drafter" / "train.yaml", changes)
    trained = JakiroDrafter.from_pretrained(train(settings))
    before = JakiroDrafter.from_pretrained(tmp_path / "drafter").state_dict()
    after = trained.state_dict()
    assert torch.equal(after["level_masks.tokens"], before["level_masks.tokens"])
    for name in ("memory_encoder.output.weight", "head_norm.weight"):
        assert not torch.equal(after[name], before[name]), name
    export_dflash(trained, ServedTarget("", "", 128))
