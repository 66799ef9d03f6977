"""A tiny target, a drafter with random weights, and texts of the target to learn from."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers.models import tiny_drafter, tiny_llama
from helpers.templates import CHATML
from helpers.tokenizers import tiny_tokenizer

from inference.adaptation.lesson import Lesson, Passage, Recipe
from inference.adaptation.weights import identity_of_drafter
from jakiro.drafter_settings import DrafterSettings
from jakiro.target.adapter import TargetAdapter

RECIPE = Recipe(learning_rate=1e-2, passes=4, compared_tokens=24)


def save_pair(folder: Path, settings: DrafterSettings | None = None) -> Path:
    """Write a target and a drafter with random weights, and return the folder."""
    tokenizer = tiny_tokenizer(CHATML)
    # With small weights, a token depends little on those far before it, so it can be learned.
    model = tiny_llama(vocab=len(tokenizer), max_position_embeddings=512, initializer_range=0.05)
    model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    drafter = tiny_drafter(TargetAdapter(model), settings)
    if drafter.own_head is not None:  # adapters do not change it, so it must be good already
        drafter.own_head.load_state_dict(model.lm_head.state_dict())
    drafter.save_pretrained(folder / "drafter")
    return folder


def texts(folder: Path, count: int, length: int = 40, first: int = 0) -> list[Passage]:
    """Return greedy continuations of random prompts, as the target writes them."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder / "target")
    prompts = np.random.default_rng(first).integers(1, model.config.vocab_size, (count, 4))
    with torch.inference_mode():
        found = model.generate(
            torch.from_numpy(prompts),
            attention_mask=torch.ones(count, 4),
            max_new_tokens=length,
            do_sample=False,
        )
    return [Passage(token_ids=tuple(row.tolist()), prompt_length=4) for row in found]


def tiny_lesson(pair: Path, **changes: Any) -> Lesson:
    """Return a lesson of the pair in a folder, with changes."""
    from transformers import LlamaForCausalLM

    from jakiro.drafter import JakiroDrafter

    target = TargetAdapter(LlamaForCausalLM.from_pretrained(pair / "target"))
    drafter = JakiroDrafter.from_pretrained(pair / "drafter")
    given: dict[str, Any] = {
        "folder": pair / "versions",
        "number": 1,
        "parent": 0,
        "drafter": str(pair / "drafter"),
        "target": str(pair / "target"),
        "identity": identity_of_drafter(drafter, target.spec.fingerprint, torch.float32),
        "dtype": "float32",
        "device": "cpu",
        "tenants": ("alice",),
        "recipe": RECIPE,
        **changes,
    }
    if "learned" not in given:
        passages = texts(pair, 72)
        given |= {"learned": passages[:64], "held_out": passages[64:]}
    return Lesson(**given)
