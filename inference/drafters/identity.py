"""Identity of a drafter: its kind, its settings, its table, and samples of its weights."""

from typing import Any

import torch
from torch import nn

from inference.adaptation.weights import sampled_weights
from inference.drafters.aded.table import TrigramIndex
from inference.protocol import Drafter
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.files import fingerprint


def identity_of(drafter: Drafter) -> list[Any]:
    """Return what distinguishes a drafter from others, in a form that can be hashed."""
    own = vars(drafter)
    settings = [str(own.get(name)) for name in ("forms", "plan", "settings")]
    parts: list[Any] = [type(drafter).__name__, drafter.version, settings]
    model = own.get("model")
    if isinstance(model, nn.Module):
        dtypes = [str(weight.dtype) for weight in model.parameters()]
        parts.append([dtypes, sampled_weights(model, torch.float64)])
    elif isinstance(model, TargetAdapter):
        parts.append([model.spec.fingerprint, str(model.dtype)])
    index = own.get("index")
    if isinstance(index, TrigramIndex):
        parts.append(
            [fingerprint(column.tobytes()) for column in (index.keys, index.ids, index.weights)]
        )
    inner = (own.get(name) for name in ("drafter", "first", "second"))
    return parts + [identity_of(other) for other in inner if isinstance(other, Drafter)]
