"""Writes a target and training data with unusable records, and runs commands on them."""

from pathlib import Path

from helpers.commands import exit_code
from helpers.models import tiny_llama
from helpers.tokenizers import tiny_tokenizer
from helpers.training import CHAT_TEMPLATE, TEXTS, write_jsonl

CHAT = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]


def write_target_and_records(folder: Path) -> Path:
    """Write a target, and data with two unusable records, into a folder; return the folder."""
    tokenizer = tiny_tokenizer(CHAT_TEMPLATE)
    model = tiny_llama(vocab=len(tokenizer), eos_token_id=0, max_position_embeddings=256)
    model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    records = [{"messages": CHAT}, {"no": 1}, {"text": TEXTS[0]}, {"messages": CHAT[1:]}]
    write_jsonl(folder / "data.jsonl", records)
    return folder


def run_on_records(folder: Path, command: str, *words: str) -> int:
    """Run a command on the target and the data of a folder, and return its exit code."""
    options = ("--target", str(folder / "target"), "--data", str(folder / "data.jsonl"))
    return exit_code(*command.split(), *options, *words)
