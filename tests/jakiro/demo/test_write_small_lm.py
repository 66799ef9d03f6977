"""The command that trains a small model to draft for a target."""

import json
from pathlib import Path

from helpers.models import tiny_llama
from helpers.tokenizers import tiny_tokenizer

from inference import SpeculativeDecoder
from inference.drafters.small_lm import SmallLMDrafter
from jakiro.demo.write import main


def test_the_model_has_the_targets_tokenizer_and_drafts_for_it(tmp_path: Path) -> None:
    tokenizer, folder, out = tiny_tokenizer(), tmp_path / "target", tmp_path / "small"
    tokenizer.save_pretrained(folder)
    texts = tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"text": "def main(argument):\n    return 1\n" * 400}) + "\n")
    words = ["small-lm", "--tokenizer", str(folder), "--texts", str(texts), "--out", str(out)]
    assert main([*words, "--layers", "1", "--hidden", "32", "--steps", "2"]) == 0
    model = tiny_llama(vocab=len(tokenizer))
    drafter = SmallLMDrafter.from_pretrained(str(out), model, tokenizer)
    assert len(SpeculativeDecoder(model, drafter).generate([1, 2], max_new_tokens=3).new_token_ids)
    assert main(words) == 2  # never overwritten


def test_texts_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    (tmp_path / "texts.jsonl").write_text('{"words": 1}\n')
    words = [
        "small-lm",
        "--tokenizer",
        str(tmp_path / "target"),
        "--texts",
        str(tmp_path / "texts.jsonl"),
    ]
    assert main([*words, "--out", str(tmp_path / "small")]) == 2
