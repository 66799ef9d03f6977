"""The needs of a server that learns: a trained drafter, and memory for a second target."""

import psutil
import torch
from torch import nn

from inference.adaptation.weights import adapted_ends
from inference.drafters.trained.drafter import TrainedDrafter
from inference.serving.scheduling.loaded_model import LoadedModel
from jakiro.errors import ConfigError, ResourceError


def drafter_that_learns(model: LoadedModel) -> TrainedDrafter:
    """Return the drafter of a model."""
    drafter = model.engine.decoder.drafter
    name = "none" if drafter is None else type(drafter).__name__
    if type(drafter) is TrainedDrafter:
        if adapted_ends(drafter.model):
            return drafter
        name = f"{name} without them"
    raise ConfigError(
        "this drafter does not learn with --adapt",
        expected="a trained drafter with attention or experts",
        got=name,
        remedy="pass the folder of a trained drafter, or leave out --adapt",
    )


def check_memory(target: nn.Module) -> None:
    """Check whether the process that learns can load the target a second time."""
    weight = next(target.parameters())
    needed = sum(own.numel() * own.element_size() for own in target.parameters())
    if weight.is_cuda:
        free, _ = torch.cuda.mem_get_info(weight.device)
    else:
        free = psutil.virtual_memory().available
    if needed > free:
        raise ResourceError(
            "there is no memory for a second copy of the target, which learning needs",
            expected=f"{needed / 1e9:.2f} GB",
            got=f"{free / 1e9:.2f} GB",
            remedy="use a smaller --capacity or fewer --places, or leave out --adapt",
        )
