"""Functions that load the target and the tokenizer named in the settings of a run."""

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from jakiro.errors import CheckpointError
from jakiro.target.checks import CausalLM
from jakiro.utils import pretrained
from training.input_settings import TargetSettings

_REMEDY = "check target.name_or_path"


def load_model(settings: TargetSettings) -> PreTrainedModel:
    """Load the target in the dtype that the settings name.

    Raises:
        CheckpointError: the target cannot be loaded.
    """
    return pretrained.load_causal_lm(settings.name_or_path, dtype=settings.dtype, remedy=_REMEDY)


def load_tokenizer(settings: TargetSettings) -> PreTrainedTokenizerBase:
    """Load the target's tokenizer.

    Raises:
        CheckpointError: the tokenizer cannot be loaded.
    """
    what = "the tokenizer of the target"
    return pretrained.load_tokenizer(settings.name_or_path, what, remedy=_REMEDY)


def vocab_size_of(settings: TargetSettings, model: CausalLM | None = None) -> int:
    """Return the number of tokens in the target's vocabulary, without loading its weights.

    Args:
        settings: the target's settings.
        model: the loaded target; None to load only its config.

    Raises:
        CheckpointError: the target has no config, or its config has no vocabulary size.
    """
    if model is not None:
        return int(model.config.get_text_config().vocab_size)
    config = pretrained.load_config(settings.name_or_path, "the target", remedy=_REMEDY)
    try:
        return int(config.get_text_config().vocab_size)
    except AttributeError as error:
        raise CheckpointError(
            f"cannot read the vocabulary size of the target {settings.name_or_path}",
            expected="the config of a causal language model",
            got=error,
            remedy=_REMEDY,
        ) from error
