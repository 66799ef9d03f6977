"""Identity of a drafter: its kind, its settings, its table, and samples of its weights."""

from typing import Any

import torch
from torch import nn

from inference.drafters.aded.table import TrigramIndex
from inference.protocol import Drafter
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.files import fingerprint

_NUM_WEIGHTS = 256  # number of weights of each tensor that identify a drafter


def identity_of(drafter: Drafter) -> list[Any]:
    """Return what distinguishes a drafter from others, in a form that can be hashed."""
    own = vars(drafter)
    settings = [str(own.get(name)) for name in ("forms", "plan", "settings")]
    parts: list[Any] = [type(drafter).__name__, drafter.version, settings]
    model = own.get("model")
    if isinstance(model, nn.Module):
        parts.append(_weights(model))
    elif isinstance(model, TargetAdapter):
        parts.append([model.spec.fingerprint, str(model.dtype)])
    index = own.get("index")
    if isinstance(index, TrigramIndex):
        parts.append(
            [fingerprint(column.tobytes()) for column in (index.keys, index.ids, index.weights)]
        )
    inner = (own.get(name) for name in ("drafter", "first", "second"))
    return parts + [identity_of(other) for other in inner if isinstance(other, Drafter)]


def _weights(model: nn.Module) -> list[Any]:
    return [
        [name, str(weight.dtype), _sample(weight.detach().flatten())]
        for name, weight in model.named_parameters()
    ]


def _sample(weights: torch.Tensor) -> list[float]:
    step = max(len(weights) // _NUM_WEIGHTS, 1)
    chosen = weights[::step][:_NUM_WEIGHTS].double()
    return [float(value) for value in chosen.nan_to_num().tolist()]
