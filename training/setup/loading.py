"""A target and its tokenizer, loaded by name."""

from peft import PeftConfig
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.peft_utils import find_adapter_config_file

from jakiro.errors import CheckpointError
from jakiro.target.checks import CausalLM
from training.input_settings import TORCH_DTYPES, TargetSettings


def load_model(settings: TargetSettings) -> PreTrainedModel:
    """Load a target.

    Raises:
        CheckpointError: the target cannot be loaded.
    """
    try:
        return AutoModelForCausalLM.from_pretrained(
            settings.name_or_path, dtype=TORCH_DTYPES[settings.dtype]
        )
    except (OSError, ValueError) as error:
        raise _cannot_load("target", settings, error) from error


def load_tokenizer(settings: TargetSettings) -> PreTrainedTokenizerBase:
    """Load a target's tokenizer.

    Raises:
        CheckpointError: the tokenizer cannot be loaded.
    """
    try:
        return AutoTokenizer.from_pretrained(settings.name_or_path)
    except (OSError, ValueError) as error:
        raise _cannot_load("tokenizer", settings, error) from error


def vocab_size_of(settings: TargetSettings, model: CausalLM | None = None) -> int:
    """Return the size of a target's vocabulary, without loading the target's weights.

    Args:
        settings: name of the target.
        model: the loaded target; None to read its config by name.

    Raises:
        CheckpointError: the target has no config that can be read.
    """
    if model is not None:
        return int(model.config.get_text_config().vocab_size)
    try:
        return int(config_at(settings.name_or_path).get_text_config().vocab_size)
    except (AttributeError, OSError, ValueError) as error:
        raise _cannot_load("target", settings, error) from error


def config_at(name_or_path: str) -> PreTrainedConfig:
    """Return a model's config; for adapters, the config of the model that they belong to.

    Raises:
        OSError: there is no config.
        ValueError: the config cannot be understood.
    """
    adapters = find_adapter_config_file(name_or_path)
    if adapters is None:
        return AutoConfig.from_pretrained(name_or_path)
    below = PeftConfig.from_pretrained(name_or_path).base_model_name_or_path
    return AutoConfig.from_pretrained(below or name_or_path)


def _cannot_load(what: str, settings: TargetSettings, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"cannot load the {what} of {settings.name_or_path}",
        expected="a folder or hub id of a causal language model with its tokenizer",
        got=str(error).strip().splitlines()[0],
        remedy="check target.name_or_path",
    )
