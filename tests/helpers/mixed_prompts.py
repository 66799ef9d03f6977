"""A target and prompts of every kind, as comparisons of drafters use them."""

from pathlib import Path

from helpers.models import tiny_llama
from helpers.tokenizers import tiny_tokenizer
from helpers.training import CHAT_TEMPLATE, write_jsonl

from jakiro.target.adapter import TargetAdapter

RECORDS = (
    {"prompt": "def main(", "category": "code"},
    {"prompt": "print(41)\n", "category": "code"},
    {"turns": ["main?", "and then?"], "category": "chat"},
    {"messages": [{"role": "user", "content": "return"}], "category": "chat"},
    {"prompt": [5, 6, 7, 8], "category": "ids"},
)


def write_target_and_prompts(folder: Path) -> TargetAdapter:
    """Write a target and a file with `RECORDS` into a folder, and return the target."""
    model = tiny_llama(vocab=300, max_position_embeddings=256)
    model.save_pretrained(folder / "target")
    tiny_tokenizer(CHAT_TEMPLATE).save_pretrained(folder / "target")
    write_jsonl(folder / "prompts.jsonl", RECORDS)
    return TargetAdapter(model)
