"""The drafters of `configs/`, with tiny layers: greedy tokens are what the target alone gives."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import tiny_drafter, tiny_llama

from inference import SpeculativeDecoder
from jakiro.drafter_settings import DrafterSettings
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.settings import merge, read_layered_yaml

CONFIGS = Path(__file__).parents[3] / "configs"
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [3]]
NEW = 14
HEADS = {"num_heads": 2, "head_dim": 8}
TINY: dict[str, Any] = {
    "trunk": HEADS | {"num_kv_heads": 1},
    "memory": HEADS | {"mlp_width": 16},
    "experts": {"intermediate_size": 24},
    "draft_vocab_size": 7,
}


def _drafter(path: Path, base: Path) -> DrafterSettings:
    layers = merge(read_layered_yaml(base), read_layered_yaml(path))["drafter"]
    return DrafterSettings.model_validate(merge(layers, TINY))


def _assert_tokens_are_the_targets(settings: DrafterSettings, num_layers: int) -> None:
    model = tiny_llama(vocab=11, num_hidden_layers=num_layers)
    decoder = SpeculativeDecoder(model, tiny_drafter(TargetAdapter(model), settings), tree="fixed")
    together = decoder.generate_batch(PROMPTS, max_new_tokens=NEW)
    for prompt, output in zip(PROMPTS, together, strict=True):
        ids = torch.tensor([prompt])
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
        alone = model.generate(ids, max_new_tokens=NEW, **options)
        assert output.sequences.tolist() == alone.tolist()
        assert decoder.generate(prompt, max_new_tokens=NEW).new_token_ids == output.new_token_ids
    assert any(output.stats.accepted.total() for output in together)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in (CONFIGS / "drafters").glob("*")))
def test_named_drafters_change_no_token(name: str) -> None:
    path = CONFIGS / "drafters" / f"{name}.yaml"
    _assert_tokens_are_the_targets(_drafter(path, CONFIGS / "base.yaml"), num_layers=12)
