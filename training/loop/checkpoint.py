"""Checkpoints from which a run resumes exactly as if it had never been interrupted.

A run does not depend on a global random state, because its sequences, anchors and learning rate are
functions of the seed and the optimizer step. A checkpoint therefore contains only the weights, the
optimizer states and the progress of the run. Tensors are stored unpartitioned, as safetensors, so
that a run can resume with a different number of processes or a different ZeRO stage.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from jakiro.errors import CheckpointError
from jakiro.utils.files import publish, write_atomically
from training.processes import Processes, import_deepspeed

WEIGHT, STEP = "weight", "step"
# States of AdamW, the only optimizer that can be combined with ZeRO 1-3.
_AVERAGES = ("exp_avg", "exp_avg_sq")
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")

Parts = Mapping[str, Tensor]  # keys: names of parameters

_STATE = "state.json"
_SUFFIX = ".safetensors"
_STEP_PREFIX = "step-"

# Errors that reading a damaged checkpoint may raise.
_DAMAGE = (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError)


@dataclass
class RunState:
    """The progress of a run.

    Attributes:
        tokens: number of tokens read, without padding.
        best_step: number of optimizer steps before the evaluation with that value.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    losses: dict[str, Any] = field(default_factory=dict)
    best_metric: str | None = None
    best_value: float | None = None
    best_step: int | None = None

    def add_score(self, metric: str, value: float) -> bool:
        """Record the result of an evaluation at this step; return whether it is the best so far.

        If the quantity differs from the earlier one, the value counts as the best so far.
        """
        if metric != self.best_metric or self.best_value is None or value > self.best_value:
            self.best_metric, self.best_value, self.best_step = metric, value, self.step
            return True
        return False

    def add_kept(self, kept: Mapping[str, Any] | None) -> None:
        """Take over the score of the drafter in `best`, which may be newer than the checkpoint."""
        if kept is None or kept["best_value"] is None:
            return
        is_same = kept["best_metric"] == self.best_metric and self.best_value is not None
        if is_same and kept["best_value"] <= self.best_value:
            return
        self.best_metric, self.best_value = kept["best_metric"], kept["best_value"]
        self.best_step = kept["best_step"]


def gather_state(engine: Any, is_kept: bool) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield the fp32 weights, then each kind of optimizer state, as tensors by parameter name.

    All processes must exhaust this iterator. Only one kind of state is in main memory at a time.

    Args:
        is_kept: whether this process receives the tensors; if not, the dictionaries are empty.
    """
    access = _access(engine)
    named = _trainable(engine)
    for kind in access.kinds():
        parts = {}
        for name, parameter in named.items():
            part = access.read(parameter, kind)
            if is_kept and part is not None:
                parts[name] = part.detach().to("cpu", copy=True).contiguous()
        yield kind, parts


@torch.no_grad()
def scatter_state(engine: Any, state: Mapping[str, Parts]) -> None:
    """Load the weights and optimizer states that `gather_state` yielded into the engine.

    All processes must call this function with the complete state.

    Raises:
        ValueError: the parameters in `state` differ from the engine's in name or shape.
    """
    access = _access(engine)
    named = _trainable(engine)
    weights = {name: _shape(parameter) for name, parameter in named.items()}
    stored = {name: part.shape for name, part in state[WEIGHT].items()}
    if weights != stored:
        raise ValueError(
            f"weights differ in name or shape: {sorted(weights.items() ^ stored.items())[:4]}"
        )
    access.prepare(state)
    for kind, parts in state.items():
        for name, part in parts.items():
            access.write(named[name], kind, part)


def scaler_state(engine: Any) -> dict[str, float]:
    """Return the state of the loss scaler; the dictionary is empty unless the run uses fp16."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return {} if not engine.fp16_enabled() else {key: getattr(scaler, key) for key in _SCALER}


class _Whole:
    """Access to weights and optimizer states that every process holds in full (ZeRO 0)."""

    def __init__(self, engine: Any) -> None:
        self._state: Any = engine.optimizer.state

    def kinds(self) -> list[str]:
        names = {kind for state in self._state.values() for kind in state}
        return [WEIGHT, *sorted(names)]

    def read(self, parameter: Tensor, kind: str) -> Tensor | None:
        return parameter if kind == WEIGHT else self._state.get(parameter, {}).get(kind)

    def prepare(self, state: Mapping[str, Parts]) -> None:
        """Do nothing, because torch creates the optimizer's states when they are set."""

    def write(self, parameter: Tensor, kind: str, value: Tensor) -> None:
        if kind == WEIGHT:
            parameter.copy_(value)
        else:
            self._state[parameter][kind] = value.to(parameter.device, copy=True)


class _Partitioned:
    """Access to weights and optimizer states in partitions of flat fp32 tensors (ZeRO 1 to 3)."""

    def __init__(self, engine: Any) -> None:
        self._deepspeed: Any = import_deepspeed()
        self._is_whole = engine.zero_optimization_stage() < 3
        self._zero = zero = engine.optimizer
        self._state: Any = zero.optimizer.state
        self._flat: list[Tensor] = (
            zero.single_partition_of_fp32_groups
            if self._is_whole
            else zero.fp32_partitioned_groups_flat
        )
        self._link()

    def kinds(self) -> list[str]:
        # There are no optimizer states if every step so far was skipped, which can happen in fp16.
        return [WEIGHT, *((*_AVERAGES, STEP) if self._state else ())]

    def read(self, parameter: Tensor, kind: str) -> Tensor | None:
        if kind == WEIGHT:
            return self._deepspeed.utils.safe_get_full_fp32_param(parameter)
        if kind == STEP:
            return self._state[self._flat[0]][STEP]
        return self._deepspeed.utils.safe_get_full_optimizer_state(parameter, kind)

    def prepare(self, state: Mapping[str, Parts]) -> None:
        """Create the optimizer's states, as the optimizer would do at its first step."""
        if STEP not in state:
            return
        step = torch.stack(list(state[STEP].values())).max()
        for flat in self._flat:
            self._state[flat][STEP] = step.to(flat.device, copy=True)
            self._state[flat].update({kind: torch.zeros_like(flat) for kind in _AVERAGES})
        self._link()

    def write(self, parameter: Tensor, kind: str, value: Tensor) -> None:
        if kind == WEIGHT:
            self._write_computed(parameter, value)
        if kind == STEP:
            return
        # DeepSpeed's functions for full tensors do not accept the padding of ZeRO 3.
        part = value if self._is_whole else _local_part(parameter, value)
        utils, extent = self._deepspeed.utils, "full" if self._is_whole else "local"
        if kind == WEIGHT:
            getattr(utils, f"safe_set_{extent}_fp32_param")(parameter, part)
        else:
            getattr(utils, f"safe_set_{extent}_optimizer_state")(parameter, part, kind)

    def _link(self) -> None:
        """Link all parameter groups to their optimizer states; ZeRO itself links only one group."""
        if self._is_whole and self._state:
            link = self._deepspeed.utils.lazy_init_hp_params_optimizer_state
            for group, flat in zip(self._zero.bit16_groups, self._flat, strict=True):
                link(group, flat, self._state)

    def _write_computed(self, parameter: Tensor, value: Tensor) -> None:
        """Set the copy of a weight that the drafter computes with, in the drafter's dtype."""
        gathered = self._deepspeed.zero.GatheredParameters(
            [parameter], modifier_rank=0, enabled=not self._is_whole
        )
        with gathered:
            parameter.copy_(value)


def _access(engine: Any) -> _Whole | _Partitioned:
    return _Partitioned(engine) if engine.zero_optimization_stage() else _Whole(engine)


def _trainable(engine: Any) -> dict[str, Any]:
    return {name: p for name, p in engine.module.named_parameters() if p.requires_grad}


def _shape(parameter: Any) -> torch.Size:
    """Return the full shape of a parameter, even if ZeRO 3 has left its own tensor empty."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def _local_part(parameter: Any, value: Tensor) -> Tensor:
    """Return this process's partition of a tensor, padded with zeros at the end as in ZeRO 3."""
    size = parameter.ds_tensor.numel()
    begin = size * torch.distributed.get_rank()
    part = value.new_zeros(size)
    here = value.flatten()[begin : begin + size]
    part[: len(here)] = here
    return part


class Checkpoints:
    """The checkpoints of a run; all processes take part, and the first one writes the files."""

    def __init__(self, folder: Path, keep: int, processes: Processes) -> None:
        self._folder = folder
        self._keep = keep
        self._processes = processes

    def latest(self) -> Path | None:
        return max(self._finished(), default=None)

    def save(self, engine: Any, state: RunState) -> None:
        """Write a checkpoint; an interruption leaves the earlier checkpoints unchanged."""
        partial, is_first = self._folder / ".partial", self._processes.is_first
        try:
            kinds: list[str] = []
            for kind, parts in gather_state(engine, is_kept=is_first):
                with self._processes.together():
                    if is_first and not kinds:
                        shutil.rmtree(partial, ignore_errors=True)
                        partial.mkdir(parents=True)
                    if is_first:
                        save_file(parts, partial / f"{kind}{_SUFFIX}")
                kinds.append(kind)
            with self._processes.together():
                if is_first:
                    facts = asdict(state) | {"scaler": scaler_state(engine), "kinds": kinds}
                    write_atomically(partial / _STATE, json.dumps(facts))
                    publish(partial, self._folder / f"{_STEP_PREFIX}{state.step:08d}")
                    self._prune()
        finally:
            if is_first:  # as after an error
                shutil.rmtree(partial, ignore_errors=True)

    def restore(self, engine: Any) -> RunState:
        """Load the latest checkpoint, if any, and return the progress of the run.

        Raises:
            CheckpointError: the checkpoint is damaged.
        """
        folder = self.latest()
        if folder is None:
            return RunState()
        with self._processes.together(), _reading(folder):
            facts = json.loads((folder / _STATE).read_bytes())
            kinds = {kind: load_file(folder / f"{kind}{_SUFFIX}") for kind in facts.pop("kinds")}
            scaler, state = facts.pop("scaler"), TypeAdapter(RunState).validate_python(facts)
        with self._processes.together(), _reading(folder):
            scatter_state(engine, kinds)
            for key, value in scaler.items():
                setattr(engine.optimizer.loss_scaler, key, value)
        return state

    def _finished(self) -> list[Path]:
        return sorted(self._folder.glob(f"{_STEP_PREFIX}*"))

    def _prune(self) -> None:
        removed = self._folder / ".removed"
        for folder in self._finished()[: -self._keep]:
            shutil.rmtree(removed, ignore_errors=True)
            folder.rename(removed)  # so that a partly removed folder does not look complete
        shutil.rmtree(removed, ignore_errors=True)


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except _DAMAGE as error:
        raise CheckpointError(
            f"cannot resume from {folder}",
            got=" ".join(f"{type(error).__name__}: {error}".split()),
            remedy="remove this folder; the run then resumes from the checkpoint before it or, if "
            "there is none, starts again",
        ) from error
