"""A training step taken apart: the bare forwards and backwards of an ideal run."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError
from jakiro.experts import ExpertsOutput
from moa.attention import KV, KVStore
from training.loss.batch import Batch
from training.loss.drafting import draft_all_positions
from training.loss.objectives import Goals, ObjectiveSettings, drafter_loss
from training.module import TargetReader

Work = Callable[[], object]


@dataclass
class _NotedStore:
    """A store of self-attention rows that can be asked again, alone.

    The rows of earlier passes are noted when it is asked first, without the graph behind them.
    """

    store: KVStore
    earlier: KV | None = None

    def __call__(self, rows: KV) -> KV:
        if self.earlier is None:
            joined, own = self.store(rows), rows.keys.shape[2]
            self.earlier = KV(*(_bare(part[:, :, : part.shape[2] - own]) for part in joined))
            return joined
        if self.earlier.keys.shape[2] == 0:
            return rows
        pairs = zip(self.earlier, rows, strict=True)
        return KV(*(torch.cat(pair, dim=2) for pair in pairs))


@dataclass
class _Calls:
    """What a module was called with, each time, without the graph behind it."""

    arguments: list[tuple[Any, ...]] = field(default_factory=list)

    def note(self, _module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        given = tuple(_NotedStore(one) if isinstance(one, KVStore) else one for one in arguments)
        self.arguments.append(tree_map_only(Tensor, _bare, given))
        return given


def parts_of(
    drafter: JakiroDrafter, reader: TargetReader, batch: Batch, objective: ObjectiveSettings
) -> dict[str, Work]:
    """Return the work of one micro-batch, part by part, on inputs that are there already.

    "target" is its forward; "memory" what the target's state is encoded to (layer self-attention,
    the rows of cross-attention, and features); "trunk" and "bank" these modules, in every pass;
    "head" the laws of target and drafter over the vocabulary with all losses. All but the first
    are forward and backward. Where features are fed back, a pass is given those of the real one.

    Args:
        drafter: at work.
        reader: of the target.
        batch: on the device.
        objective: weights of the losses.

    Raises:
        ConfigError: the drafter has target layers behind it.
    """
    tail_layers = drafter.config.settings.tail_layers
    if tail_layers:
        raise ConfigError(
            "the parts of this drafter cannot be timed alone",
            expected="drafter.tail_layers 0",
            got=str(tail_layers),
        )
    view = reader.view(batch)
    with _listening(drafter.trunk, drafter.experts) as (to_trunk, to_bank):
        outputs = [_bare_output(one) for one in draft_all_positions(drafter, view, batch)]

    def memory() -> None:
        _backward(drafter.encode_memory(view.state, batch.positions))

    def head() -> None:
        for draw, output in enumerate(outputs):
            goals = Goals(view.features)
            drafter_loss(output, goals, batch, draw, reader.heads, objective).total.backward()

    return {
        "target": lambda: reader.view(batch),
        "memory": memory,
        "trunk": _replayed(drafter.trunk, to_trunk),
        "experts": _replayed(drafter.experts, to_bank),
        "head": head,
    }


def flops_of(work: Work) -> int:
    """Return the floating-point operations of matrix products and attention in some work."""
    with FlopCounterMode(display=False) as counter:
        work()
    return int(counter.get_total_flops())


@contextmanager
def _listening(*modules: nn.Module) -> Iterator[list[_Calls]]:
    calls = [_Calls() for _ in modules]
    hooks = [
        module.register_forward_pre_hook(one.note)
        for module, one in zip(modules, calls, strict=True)
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _replayed(module: nn.Module, calls: _Calls) -> Work:
    def work() -> None:
        for arguments in calls.arguments:
            _backward(module(*arguments))

    return work


def _backward(outputs: Any) -> None:
    """Send a gradient of ones through what needs one."""
    tensors = [one for one in tree_leaves(outputs) if isinstance(one, Tensor) and one.requires_grad]
    if tensors:  # features are encoded without a parameter unless they are fused
        torch.autograd.backward(tensors, [torch.ones_like(one) for one in tensors])


def _bare(tensor: Tensor) -> Tensor:
    """Return a tensor without its past, to be differentiated by if it has one."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _bare_output(output: ExpertsOutput) -> ExpertsOutput:
    fields: Sequence[Any] = [None if part is None else _bare(part) for part in output]
    return ExpertsOutput(*fields)
