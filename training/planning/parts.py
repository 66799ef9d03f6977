"""The parts of a training step: forward and backward passes that can be run separately."""

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
from training.loss.settings import ObjectiveSettings
from training.module import TargetReader, TrainingModule

Work = Callable[[], object]


@dataclass
class _RecordedStore:
    """A store of self-attention's keys and values with which a pass can be replayed separately.

    The first call records the keys and values of the earlier passes, detached from their graph.
    Later calls use the recorded ones.
    """

    store: KVStore
    earlier: KV | None = None

    def __call__(self, kv: KV) -> KV:
        if self.earlier is None:
            joined, own = self.store(kv), kv.keys.shape[2]
            self.earlier = KV(*(_bare(part[:, :, : part.shape[2] - own]) for part in joined))
            return joined
        if self.earlier.keys.shape[2] == 0:
            return kv
        pairs = zip(self.earlier, kv, strict=True)
        return KV(*(torch.cat(pair, dim=2) for pair in pairs))


def _recorded(argument: Any) -> Any:
    """Return an argument whose stores, if it consists of stores, can be replayed."""
    if isinstance(argument, tuple) and argument and isinstance(argument[0], KVStore):
        return tuple(map(_RecordedStore, argument))
    return _RecordedStore(argument) if isinstance(argument, KVStore) else argument


@dataclass
class _Calls:
    """The arguments of all calls of a module, detached from their graph."""

    arguments: list[tuple[Any, ...]] = field(default_factory=list)

    def record(self, _module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        given = tuple(map(_recorded, arguments))
        self.arguments.append(tree_map_only(Tensor, _bare, given))
        return given


def parts_of(
    drafter: JakiroDrafter, reader: TargetReader, batch: Batch, objective: ObjectiveSettings
) -> dict[str, Work]:
    """Return one function for each part of a training step; the keys are the names of the parts.

    Each function runs its part of one micro-batch on recorded inputs. "target" is the forward pass
    of the target. "memory" computes the drafter's memory and features from the target's states.
    "trunk" and "experts" run these modules, and networks for parallel levels, for all passes of the
    drafter. "head" computes the distributions of target and drafter over the vocabulary, and all
    losses. All parts except "target" include the backward pass. If features are fed back, each pass
    receives the recorded features.

    Args:
        drafter: drafter to be measured.
        reader: reader of the target's states.
        batch: micro-batch on the device.
        objective: weights of the losses.

    Raises:
        ConfigError: the drafter's output passes through tail layers of the target.
    """
    tail_layers = drafter.config.settings.tail_layers
    if tail_layers:
        raise ConfigError(
            "the parts of this drafter cannot be timed separately",
            expected="drafter.tail_layers of 0",
            got=str(tail_layers),
        )
    view, module = reader.view(batch), TrainingModule(drafter, objective)
    after = [drafter.experts, *([] if drafter.level_heads is None else [drafter.level_heads])]
    with _recording(drafter.trunk, *after) as (to_trunk, *to_others):
        outputs = [_bare_output(output) for output in draft_all_positions(drafter, view, batch)]

    def memory() -> None:
        _backward(drafter.encode_memory(view.state, batch.positions))

    def head() -> None:
        module.loss_of(outputs, view, batch, reader).total.backward()

    return {
        "target": lambda: reader.view(batch),
        "memory": memory,
        "trunk": _replayed(drafter.trunk, to_trunk),
        "experts": lambda: [replay() for replay in map(_replayed, after, to_others)],
        "head": head,
    }


def flops_of(work: Work) -> int:
    """Return how many floating-point operations `work` needs for matrix products and attention."""
    with FlopCounterMode(display=False) as counter:
        work()
    return int(counter.get_total_flops())


@contextmanager
def _recording(*modules: nn.Module) -> Iterator[list[_Calls]]:
    calls = [_Calls() for _ in modules]
    hooks = [
        module.register_forward_pre_hook(own.record)
        for module, own in zip(modules, calls, strict=True)
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
    """Backpropagate a gradient of ones from the outputs that require a gradient."""
    leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    tensors = [leaf for leaf in leaves if leaf.requires_grad]
    if tensors:  # features that are not fused depend on no parameter
        torch.autograd.backward(tensors, [torch.ones_like(tensor) for tensor in tensors])


def _bare(tensor: Tensor) -> Tensor:
    """Return a tensor detached from its graph; it requires a gradient if `tensor` does."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _bare_output(output: ExpertsOutput) -> ExpertsOutput:
    fields: Sequence[Any] = [None if part is None else _bare(part) for part in output]
    return ExpertsOutput(*fields)
