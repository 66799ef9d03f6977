"""Target states of tiny runs, and comparisons of views computed online and read from disk."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from helpers.training import tiny_run
from torch import Tensor

from jakiro.drafter_settings import DrafterSettings
from jakiro.target.checks import CausalLM
from jakiro.utils.pretrained import TORCH_DTYPES
from training.config import TrainSettings, anchor_rule
from training.data.sampler import Sampler
from training.loss.batch import Batch, TargetView
from training.module import TargetReader
from training.setup.preparation import RunInputs, prepare
from training.target_states.store import open_target_states
from training.target_states.writer import TargetStateWriter


def offline_run(folder: Path, dtype: str = "fp32", **changes: Any) -> TrainSettings:
    """Return the settings of a tiny run that reads target states from disk."""
    group = {"source": "offline", "folder": str(folder / "features"), "dtype": dtype}
    return tiny_run(folder, target_states=group, **changes)


def write_target_states(
    settings: TrainSettings, model: CausalLM | None = None, shard_bytes: int = 2**16
) -> TargetStateWriter:
    """Write the target states that a run reads, into several shards; return the writer."""
    assert settings.target_states.folder is not None
    writer = TargetStateWriter(prepare(settings, model), settings.target_states.folder, shard_bytes)
    assert writer.write()
    return writer


def with_drafter(settings: TrainSettings, drafter: DrafterSettings) -> TrainSettings:
    """Return the settings of the same run with another drafter."""
    return settings.model_copy(update={"drafter": drafter})


def both_views(
    settings: TrainSettings, model: CausalLM | None = None
) -> Iterator[tuple[TargetView, TargetView]]:
    """Yield the view of each micro-batch of two epochs, computed online and read from disk."""
    inputs = prepare(settings, model)
    online, offline = _reader(inputs, is_offline=False), _reader(inputs, is_offline=True)
    for batch in _batches(inputs):
        yield online.view(batch), offline.view(batch)


def batches(settings: TrainSettings, model: CausalLM | None = None) -> Iterator[Batch]:
    """Yield each micro-batch of two epochs."""
    return _batches(prepare(settings, model))


def _batches(inputs: RunInputs) -> Iterator[Batch]:
    settings, size = inputs.settings, inputs.settings.batch.micro_batch_size
    sampler = Sampler(inputs.sequences, sequences_per_step=size, rule=anchor_rule(settings), seed=0)
    for step in range(-(-2 * sampler.num_sequences // size)):
        yield sampler.batch(step, 0, size)


def tensors(view: TargetView) -> dict[str, Tensor]:
    """Return the tensors of a view by name."""
    named: dict[str, Tensor | None] = {
        "features": view.features,
        "memory": view.state.memory,
        "state": view.state.features,
        "embeddings": view.embeddings,
        "tail_input": view.tail_input,
    }
    named |= {f"tail_kv {number}": part for number, part in enumerate(view.tail_kv)}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def assert_same(one: TargetView, other: TargetView) -> None:
    """Check that two views are equal bit by bit."""
    assert tensors(one).keys() == tensors(other).keys()
    for name, tensor in tensors(one).items():
        assert torch.equal(tensor, tensors(other)[name]), name


def _reader(inputs: RunInputs, *, is_offline: bool) -> TargetReader:
    settings = inputs.settings
    torch.manual_seed(0)
    return TargetReader(
        inputs.target,
        inputs.build_drafter(),
        settings.data.sequence_length,
        TORCH_DTYPES[settings.engine.dtype],
        open_target_states(inputs) if is_offline else None,
    )
