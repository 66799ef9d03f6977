"""GGUF files as targets: same logits and tokens, one conversion, errors that name the cause."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.gguf_files import write_gguf
from helpers.models import tiny_llama
from helpers.templates import CHATML
from helpers.tokenizers import tiny_tokenizer
from transformers import AutoModelForCausalLM

from inference import SpeculativeDecoder
from inference.benchmark.document import environment_of
from jakiro.errors import CheckpointError, ConfigError
from jakiro.target.adapter import TargetAdapter
from jakiro.target.record import record_target
from jakiro.utils import gguf
from jakiro.utils.pretrained import load_causal_lm, load_config, load_tokenizer

PROMPT = [5, 6, 7, 8]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder for the test."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(gguf, "user_cache_path", lambda _name: folder)
    return folder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The GGUF file of a small model with its tokenizer."""
    path = tmp_path / "model" / "tiny.gguf"
    path.parent.mkdir()
    write_gguf(path, tiny_llama(vocab=300), tiny_tokenizer(CHATML))
    return path


@pytest.mark.parametrize("form", ["file", "folder"])
def test_a_gguf_file_has_the_logits_and_the_tokens_of_its_model(file: Path, form: str) -> None:
    name = file if form == "file" else file.parent
    model = load_causal_lm(name, dtype="fp32")
    ids = torch.tensor([PROMPT])
    torch.testing.assert_close(model(ids).logits, tiny_llama(vocab=300)(ids).logits)
    tokenizer, own = load_tokenizer(name), tiny_tokenizer(CHATML)
    assert tokenizer("a main(41) ü").input_ids == own("a main(41) ü").input_ids
    assert tokenizer.chat_template == CHATML
    assert tokenizer.eos_token_id == own.eos_token_id
    assert load_config(name).vocab_size == 300
    assert model.name_or_path == str(name)


def test_decoding_and_records_work_as_with_any_target(file: Path) -> None:
    decoder = SpeculativeDecoder.from_pretrained("lookup", str(file), dtype="fp32", tree="fixed")
    expected = SpeculativeDecoder(tiny_llama(vocab=300)).generate(PROMPT, max_new_tokens=12)
    assert decoder.generate(PROMPT, max_new_tokens=12).new_token_ids == expected.new_token_ids
    record = record_target(TargetAdapter(decoder.target.model).spec, str(file))
    checksum = hashlib.sha256(file.read_bytes()).hexdigest()
    assert record.gguf_sha256 == checksum
    facts = environment_of(decoder.target, str(file)).target
    assert facts.gguf_sha256 == checksum
    assert facts.weights == "float32 (dequantized from a GGUF file)"


def test_a_file_is_converted_once_for_each_dtype_and_content(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load_causal_lm(file, dtype="fp32")
    assert load_causal_lm(file, dtype="bf16").dtype == torch.bfloat16
    assert load_tokenizer(file).vocab_size > 0  # needs no weights
    assert load_config(file).vocab_size == 300
    assert len([path for path in (cache / "gguf").iterdir() if path.is_dir()]) == 2
    monkeypatch.setattr(gguf, "_convert", None)
    again = load_causal_lm(file, dtype="fp32")
    assert torch.equal(again.lm_head.weight, first.lm_head.weight)
    monkeypatch.undo()
    monkeypatch.setattr(gguf, "user_cache_path", lambda _name: cache)
    write_gguf(file, tiny_llama(vocab=300, seed=1), tiny_tokenizer())
    other = load_causal_lm(file, dtype="fp32")
    assert not torch.equal(other.lm_head.weight, first.lm_head.weight)


def test_a_file_without_all_tensors_is_refused(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = AutoModelForCausalLM.from_pretrained

    def lacking(*arguments: Any, **options: Any) -> Any:
        model, report = read(*arguments, **options)
        return model, report | {"missing_keys": {"model.layers.1.mlp.up_proj.weight"}}

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lacking)
    with pytest.raises(
        CheckpointError, match=r"no tensors for 1 weights, such as model\.layers\.1"
    ):
        load_causal_lm(file)
    assert not list(cache.rglob("*.safetensors"))


def test_a_damaged_file_is_named_and_leaves_no_folder(file: Path, cache: Path) -> None:
    file.write_bytes(file.read_bytes()[:3000])
    with pytest.raises(CheckpointError, match=r"cannot convert the GGUF file .*tiny\.gguf"):
        load_causal_lm(file)
    assert not [path for path in (cache / "gguf").iterdir() if path.is_dir()]


def test_missing_and_ambiguous_files_are_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        load_causal_lm(file.with_name("other.gguf"))
    (file.parent / "second.gguf").touch()
    with pytest.raises(ConfigError, match=r"several models.*second\.gguf, tiny\.gguf"):
        load_tokenizer(file.parent)
