"""Prompts of real text for a target that has a tokenizer."""

import argparse
from pathlib import Path

from transformers import AutoTokenizer

from inference.bench.subject import PROMPT_TOKENS, SHARED_TARGET, random_prompts
from inference.prompts import Prompt, encode_prompt
from inference.verify.prompts import BUILT_IN, read_prompts
from jakiro.target import TargetAdapter

MARGIN = 16  # positions left over behind what is decoded
SHARED_PROMPTS = SHARED_TARGET / "prompts-test.jsonl"


def add_prompt_options(parser: argparse.ArgumentParser, count: int, new_tokens: int) -> None:
    """Add the options that say what to continue, and how far."""
    parser.add_argument(
        "--prompts",
        type=Path,
        help="file of prompts, one object with the field `prompt` per line; by default "
        "prompts-test.jsonl of ../shared/reference-target, or built-in ones",
    )
    parser.add_argument("--count", type=int, default=count, help="prompts to take")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="kept of each prompt's end")
    parser.add_argument("--new-tokens", type=int, default=new_tokens)


def load_prompts(options: argparse.Namespace, target: TargetAdapter) -> list[list[int]]:
    """Return the token ids of the prompts that the options name.

    They are random ones where the target was made up and has no tokenizer.
    """
    place = target.model.name_or_path
    if not place:
        return random_prompts(target, options.count, PROMPT_TOKENS)
    tokenizer = AutoTokenizer.from_pretrained(place)
    file = options.prompts or (SHARED_PROMPTS if SHARED_PROMPTS.is_file() else None)
    prompts: list[Prompt] = list(BUILT_IN) if file is None else read_prompts(file)
    vocab_size = target.spec.vocab_size
    ids = [encode_prompt(one, tokenizer, vocab_size) for one in prompts[: options.count]]
    room = target.spec.max_position - options.new_tokens - MARGIN
    return [one[-min(options.prompt_tokens, room) :] for one in ids]
