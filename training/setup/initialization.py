"""Initial weights of a drafter: random, from another drafter, or from layers of the target."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from jakiro.drafter import JakiroDrafter
from jakiro.drafter_settings import DrafterSettings
from jakiro.errors import ConfigError
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.logs import get_logger
from training.config import TrainSettings
from training.loss.batch import Batch
from training.setup.layer_start import (
    replaced_layer,
    start_as_layers,
    start_from,
    start_masks,
    start_memory,
)
from training.setup.path_fit import start_path
from training.setup.target_layer import LayerAttention, layers_of, read_attention

_logger = get_logger(__name__)


def check_initialization(settings: TrainSettings, target: TargetAdapter) -> None:
    """Raise an error if a drafter cannot be initialized from the target layer in the settings."""
    _attentions_to_start_from(settings, target)
    if settings.initialize.memory == "target_layer":
        check_view(settings.drafter, len(layers_of(target)), _layer_index(settings))


def initialize(
    drafter: JakiroDrafter,
    settings: TrainSettings,
    target: TargetAdapter,
    start: JakiroDrafter | None = None,
    batches: Iterable[Batch] | None = None,
) -> None:
    """Set the initial weights of a drafter, which are the same on every process.

    Args:
        start: the drafter that `read_start` returns; None to start without another drafter.
        batches: batches to which the drafter's input is fitted if `is_fitted` returns True; None to
            leave out the fit, because a checkpoint will be loaded.
    """
    if start is not None:
        drafter.load_state_dict(start.state_dict())
        return
    if drafter.own_head is not None:
        start_head(drafter.own_head, target, drafter.draft_ids)
    mask = settings.drafter.trunk.block.mask_token
    if mask is not None and drafter.level_masks is not None:
        drafter.level_masks.tokens.copy_(target.embed(torch.tensor([[mask]]).to(target.device))[0])
    examples = None if batches is None else list(batches)
    _start_trunk(drafter, settings, target, examples)
    if examples is None:
        return
    if drafter.level_masks is not None:
        start_masks(drafter, target, examples)
    if drafter.path_features is not None:
        start_path(drafter, target, examples)


def _start_trunk(
    drafter: JakiroDrafter,
    settings: TrainSettings,
    target: TargetAdapter,
    batches: list[Batch] | None,
) -> None:
    nn.Module.to(drafter, target.device)  # type checkers do not know `drafter.to`
    attentions = _attentions_to_start_from(settings, target, is_logged=True)
    if attentions is None:
        return
    start_from(drafter.trunk, attentions)
    views_layer = settings.initialize.memory == "target_layer"
    if views_layer or drafter.trunk.memory_norm is not None:
        last = _layer_index(settings) % len(layers_of(target))
        start_memory(drafter, range(last + 1 - len(attentions), last + 1))
    if not is_fitted(settings, target):
        _logger.info("only the trunk's attention starts with weights of the target")
    elif batches is not None:
        start_as_layers(drafter, target, batches, settings.seed, views_layer)


def reads_data(settings: TrainSettings, target: TargetAdapter) -> bool:
    """Return whether the initial weights of a new drafter depend on training data."""
    schedule, start = settings.drafter.schedule, settings.initialize
    has_rows = schedule.heads == "masks" or schedule.path in ("embedding", "recurrent")
    may_fit = start.drafter is None and start.fit_tokens > 0
    return may_fit and (has_rows or is_fitted(settings, target))


def is_fitted(settings: TrainSettings, target: TargetAdapter) -> bool:
    """Return whether a new drafter starts with all weights of target layers and a fitted input.

    These layers are the last ones before the drafter's tail layers, or the target's last ones if
    there are no tail layers. Only a drafter whose trunk reads features, and joins them and single
    tokens with a bias, can be fitted.
    """
    drafter, start = settings.drafter, settings.initialize
    if start.drafter is not None or not start.fit_tokens or not drafter.trunk.reads_features:
        return False
    if not drafter.trunk.input_bias or drafter.trunk.tokens != "single":
        return False
    index = replaced_layer(drafter)
    if start.attention_layer not in ("auto", index, index + len(layers_of(target))):
        return False
    return _attentions_to_start_from(settings, target) is not None


def _layer_index(settings: TrainSettings) -> int:
    index = settings.initialize.attention_layer
    return index if isinstance(index, int) else replaced_layer(settings.drafter)


def _attentions_to_start_from(
    settings: TrainSettings, target: TargetAdapter, *, is_logged: bool = False
) -> list[LayerAttention] | None:
    """Return the attention of the layers to start from; None for random weights."""
    index, trunk = settings.initialize.attention_layer, settings.drafter.trunk
    if index is None:
        return None
    # Random weights would not be the layer's view.
    may_be_random = index == "auto" and settings.initialize.memory != "target_layer"
    try:
        is_like_target = trunk.kind in ("feedback", "block") and trunk.num_layers > 1
        if not (trunk.num_layers == 1 or is_like_target) or not trunk.attention_norm:
            raise ConfigError(
                "only a trunk with attention_norm, of one layer or of kind feedback or block, can "
                "start with layers of the target",
                remedy="set initialize.attention_layer to null",
            )
        heads, index = trunk.heads_for(target.spec.attention), _layer_index(settings)
        layers = range(index - trunk.num_layers + 1, index + 1)
        return [read_attention(target, layer, heads) for layer in layers]
    except ConfigError as error:
        if not may_be_random:
            raise
        if is_logged:
            _logger.info(f"the trunk's attention starts with random weights: {error}")
        return None


def check_view(drafter: DrafterSettings, num_layers: int, index: int) -> None:
    """Raise an error unless memory can be the input of a layer of the target."""
    memory, state = drafter.memory, index % num_layers
    is_linear = memory.source == "hidden" and not memory.layer_attention and not memory.common_width
    # There is one hidden state more than layers, because the embedding is one, too.
    has_state = state in {layer % (num_layers + 1) for layer in memory.layers or ()}
    if drafter.trunk.kind in ("moa", "hybrid") and is_linear and has_state:
        return
    raise ConfigError(
        f"memory cannot start as the view of layer {state} of the target",
        expected="a trunk of kind moa or hybrid, and drafter.memory with source hidden, "
        f"layer_attention false, no common_width, and {state} among its layers",
    )


@torch.no_grad()
def start_head(head: nn.Linear, target: TargetAdapter, token_ids: Tensor | None) -> None:
    """Copy the rows of the target's head to a drafter's own head, if they are a plain matrix."""
    weight = getattr(target.head, "weight", None)
    if type(target.head) is not nn.Linear or not isinstance(weight, Tensor):
        _logger.info("the drafter's own head starts with random weights")
        return
    rows = weight if token_ids is None else weight[token_ids.to(weight.device)]
    head.weight.copy_(rows)
