"""The model card of a drafter lists what was measured, and what was not."""

from typing import Any

from helpers.models import tiny_llama, tiny_settings
from huggingface_hub import ModelCard

from jakiro.config import JakiroConfig, config_for
from jakiro.target.adapter import TargetAdapter
from jakiro.target.record import record_target
from training.config import TrainSettings
from training.loop.model_card import model_card

DECODING = {
    "temperature": 0.0,
    "tau": 2.345,
    "conditional_acceptance_rate": [0.71, 0.5],
    "prompts": 8,
    "tokens": 512,
}
HELD_OUT = {"positions": 900, "levels": [{"agreement": 0.4321}]}


def _config(
    evaluation: dict[str, Any], target: str = "org/target", **settings: Any
) -> JakiroConfig:
    """Return the config of a finished drafter."""
    full = TrainSettings.model_validate(
        {
            "target": {"name_or_path": target},
            "data": {"paths": ["org/chats:train"]},
            "drafter": {"experts": {"num_experts": 2}},
            **settings,
        }
    )
    record = record_target(TargetAdapter(tiny_llama()).spec, target)
    config = config_for(tiny_settings(), record)
    config.record = {
        "settings": full.model_dump(mode="json"),
        "training": {"step": 40, "tokens": 123_456},
        "evaluation": evaluation,
        "provenance": {
            "git": {"sha": "abc123", "is_dirty": True},
            "versions": {"torch": "2.13"},
            "time": "2026-01-01T00:00:00+00:00",
        },
    }
    return config


def test_the_card_has_target_data_and_measurements() -> None:
    text = model_card(_config({"decoding": [DECODING], "validation": HELD_OUT}))
    card = ModelCard(text)
    assert card.data.base_model == "org/target"
    assert card.data.library_name == "jakiro"
    assert card.data.datasets == ["org/chats"]
    assert "speculative-decoding" in card.data.tags
    for phrase in (
        "| 0 | 2.35 | 0.71, 0.50 | 512 |",
        "8 prompts (the starts of held-out records)",
        "43.2%",
        "40 optimizer steps over 123,456 tokens of `org/chats:train`",
        "commit abc123 with local changes",
        "torch 2.13",
        "num_experts: 2",
        "Not measured here: speed",
    ):
        assert phrase in text.replace("\n", " ") or phrase in text, phrase


def test_the_card_says_if_tau_was_not_measured_and_names_no_folder_of_the_machine() -> None:
    text = model_card(
        _config(
            {},
            target="/folder/of/someone/target",
            data={"paths": ["/folder/of/someone/chats.jsonl"]},
            initialize={"drafter": "/folder/of/someone/base"},
            lora={"rank": 4},
        )
    )
    card = ModelCard(text)
    assert card.data.base_model is None
    assert card.data.datasets is None
    assert "Tau was not measured" in text
    assert "someone" not in text
    assert "drafter `base`; only adapters were trained" in text
    assert "rank: 4" in text
