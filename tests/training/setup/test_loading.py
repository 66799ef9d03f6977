"""Loading of targets with adapters, and properties that are known without the weights."""

from pathlib import Path

import pytest
from helpers.models import tiny_llama
from peft import LoraConfig, get_peft_model

from jakiro.errors import CheckpointError
from training.input_settings import TargetSettings
from training.setup.loading import load_model, vocab_size_of


# The warning comes from the code in transformers that loads adapters.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_have_the_config_of_their_base_model(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "base")
    base = tiny_llama().from_pretrained(tmp_path / "base")
    get_peft_model(base, LoraConfig(task_type="CAUSAL_LM")).save_pretrained(tmp_path / "adapters")
    settings = TargetSettings(name_or_path=str(tmp_path / "adapters"))
    assert vocab_size_of(settings) == 61
    assert any("lora" in name for name, _ in load_model(settings).named_parameters())


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot load the target"):
        vocab_size_of(TargetSettings(name_or_path=str(tmp_path)))
