"""The examples in the docstrings of public classes run."""

import inspect
from textwrap import dedent
from typing import Any

import pytest
import torch
from helpers.models import tiny_drafter, tiny_llama
from helpers.tokenizers import tiny_tokenizer

from inference import Conversation, SpeculativeDecoder
from inference.drafters.aded import AdedDrafter, AdedSettings
from inference.drafters.combined.drafter import CombinedDrafter
from inference.drafters.lookup import LookupDrafter, LookupSettings
from inference.drafters.repeating import RepeatingDrafter
from inference.drafters.small_lm import SmallLMDrafter
from inference.outputs import GenerateOutput
from inference.trees.shape import TreeShape
from jakiro import JakiroDrafter
from jakiro.target.adapter import TargetAdapter

CLASSES = (
    SpeculativeDecoder,
    Conversation,
    JakiroDrafter,
    AdedDrafter,
    LookupDrafter,
    RepeatingDrafter,
    SmallLMDrafter,
    CombinedDrafter,
    TreeShape,
)


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The names that an example may use without defining them."""
    tokenizer = tiny_tokenizer()
    target = tiny_llama(vocab=len(tokenizer), max_position_embeddings=512)
    folder = tmp_path_factory.mktemp("drafter")
    drafter = tiny_drafter(TargetAdapter(target))
    drafter.save_pretrained(folder)
    torch.manual_seed(0)
    return {
        "target": target,
        "tokenizer": tokenizer,
        "small_lm": tiny_llama(vocab=len(tokenizer), seed=1, num_hidden_layers=1),
        "drafter_path": str(folder),
        "decoder": SpeculativeDecoder(target, drafter, tokenizer),
        "AdedSettings": AdedSettings,
        "LookupSettings": LookupSettings,
        **{public.__name__: public for public in CLASSES},
    }


@pytest.mark.parametrize("public", CLASSES, ids=lambda public: public.__name__)
def test_the_example_of_a_public_class_runs(public: type, names: dict[str, Any]) -> None:
    text = inspect.getdoc(public) or ""
    _, _, example = text.partition("\nExample:\n")
    assert example, f"{public.__name__} has no example"
    found = dict(names)
    exec(dedent(example), found)
    output = found.get("second") or found["output"]
    assert isinstance(output, GenerateOutput)
    assert output.new_token_ids
