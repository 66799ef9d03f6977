"""With the default settings, a drafter trains and decodes losslessly."""

from pathlib import Path

import pytest
from helpers.losslessness import (
    assert_conversation_goes_on,
    assert_follows_distribution,
    greedy_by_transformers,
)
from helpers.models import tiny_llama
from helpers.training import write_jsonl

from inference import SpeculativeDecoder
from jakiro.utils.settings import merge, read_layered_yaml, validate_settings
from training.config import TrainSettings
from training.train import train

CONFIGS = Path(__file__).parents[2] / "configs"
# Settings that make the run small.
_SMALL = {
    "steps": 4,
    "optimizer": {"warmup_steps": 2},
    "batch": {"global_batch_size": 2, "micro_batch_size": 2},
}


@pytest.fixture(params=["base", "drafters/jakiro"])
def settings(workshop: Path, request: pytest.FixtureRequest) -> TrainSettings:
    """Return the settings of a run on a target whose vocabulary allows exact distributions."""
    tiny_llama().save_pretrained(workshop / "target")
    tokens = [[(n * k) % 60 + 1 for k in range(40)] for n in range(1, 9)]
    records = [{"input_ids": ids, "loss_mask": [0] * 4 + [1] * 36} for ids in tokens]
    values = {
        "target": {"name_or_path": str(workshop / "target")},
        "data": {
            "paths": [str(write_jsonl(workshop / "tokens.jsonl", records))],
            "sequence_length": 64,
            "cache_folder": str(workshop / "cache"),
        },
        "run_folder": str(workshop / "run"),
        **_SMALL,
    }
    changes = read_layered_yaml(CONFIGS / f"{request.param}.yaml")
    return validate_settings(TrainSettings, merge(changes, values), source="the test")


def test_a_drafter_of_bare_defaults_trains_and_decodes_losslessly(settings: TrainSettings) -> None:
    decoder = SpeculativeDecoder.from_pretrained(train(settings), tree="fixed")
    model = tiny_llama()
    for prompt in ([1, 2, 3], [7, 14, 21, 28]):
        output = decoder.generate(prompt, temperature=0.0, max_new_tokens=24)
        assert output.sequences[0].tolist() == greedy_by_transformers(model, prompt, 24)
        assert output.stats.proposed_by_proposer.total() > 0
    assert_conversation_goes_on(decoder, model)
    stats = assert_follows_distribution(decoder, model, 0.8, samples=400, batch=200)
    assert stats.accepted.total() > 0
