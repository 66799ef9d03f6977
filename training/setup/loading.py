"""Loading of the target, the tokenizer, and the drafter to start from that settings name."""

from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from jakiro.config import JakiroConfig
from jakiro.drafter import JakiroDrafter
from jakiro.drafter_settings import DrafterSettings
from jakiro.errors import ConfigError
from jakiro.target.checks import CausalLM
from jakiro.utils import pretrained
from jakiro.utils.logs import get_logger
from jakiro.utils.settings import flattened
from training.config import TrainSettings
from training.input_settings import TargetSettings

_REMEDY = "check target.name_or_path"
# Settings that may differ, because they change the depth of drafting and of training, but not the
# shapes of weights.
_FREE: Any = {"schedule": {"autoregressive_levels"}, "trunk": {"ttt_steps"}}

_logger = get_logger(__name__)


def load_model(settings: TargetSettings) -> PreTrainedModel:
    """Load the target in the dtype that the settings name."""
    return pretrained.load_causal_lm(settings.name_or_path, dtype=settings.dtype, remedy=_REMEDY)


def load_tokenizer(settings: TargetSettings) -> PreTrainedTokenizerBase:
    """Load the target's tokenizer."""
    what = "the tokenizer of the target"
    return pretrained.load_tokenizer(settings.name_or_path, what, remedy=_REMEDY)


def vocab_size_of(settings: TargetSettings, model: CausalLM | None = None) -> int:
    """Return the number of tokens in the target's vocabulary, without loading its weights.

    Args:
        model: the loaded target; None to load only its config.
    """
    if model is not None:
        return int(model.config.get_text_config().vocab_size)
    config = pretrained.load_config(settings.name_or_path, "the target", remedy=_REMEDY)
    return int(config.get_text_config().vocab_size)


def read_start(settings: TrainSettings, config: JakiroConfig) -> JakiroDrafter | None:
    """Return the drafter whose weights a new drafter starts with; None if the settings name none.

    If `draft_vocab_size` is auto, the new drafter gets the draft vocabulary of the returned one.

    The returned drafter may have been trained for a different target of the same shape, such as an
    earlier version of the target.
    """
    name = settings.initialize.drafter
    if name is None:
        return None
    start = JakiroDrafter.from_pretrained(name)
    if settings.drafter.draft_vocab_size == "auto":
        size = {"draft_vocab_size": start.config.draft_vocab_size}
        config = JakiroConfig(
            drafter=(config.drafter or {}) | size, target=config.target, record=config.record
        )
    _require_same_settings(name, start.config.settings, config.settings)
    _require_same_shapes(name, start, config)
    if start.config.target_record.fingerprint != config.target_record.fingerprint:
        _logger.warning(
            f"the drafter in {name} was made for another target, "
            f"{start.config.target_record.name_or_path}; training starts with this drafter anyway"
        )
    return start


def _require_same_settings(name: str, start: DrafterSettings, wanted: DrafterSettings) -> None:
    both = (settings.model_dump(mode="json", exclude=_FREE) for settings in (start, wanted))
    theirs, ours = (dict(flattened(values)) for values in both)
    for key, expected in ours.items():
        if theirs[key] != expected:
            raise ConfigError(
                f"the drafter in {name} has a different value of drafter.{key}",
                expected=str(expected),
                got=theirs[key],
            )


def _require_same_shapes(name: str, start: JakiroDrafter, config: JakiroConfig) -> None:
    with torch.device("meta"):
        wanted = {key: part.shape for key, part in JakiroDrafter(config).state_dict().items()}
    for key, part in start.state_dict().items():
        if part.shape != wanted.get(key):
            raise ConfigError(
                f"the drafter in {name} was made for a target of a different shape ({key} differs)",
                expected=wanted.get(key),
                got=part.shape,
            )
