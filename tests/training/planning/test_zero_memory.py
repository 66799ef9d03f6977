"""The estimated memory of parameters and states equals that of real engines."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.training import tiny_run

from jakiro.drafter import JakiroDrafter
from jakiro.utils.pretrained import TORCH_DTYPES
from training.config import TrainSettings, anchor_rule
from training.data.sampler import Sampler
from training.loop.trainer import Trainer
from training.module import TargetReader, TrainingModule
from training.planning.estimate import estimate
from training.planning.memory import drafter_on_meta, state_bytes, target_on_meta
from training.processes import join_processes, launch_environment
from training.setup.preparation import RunInputs, prepare


@contextmanager
def trainer_of(settings: TrainSettings) -> Iterator[Trainer]:
    """Yield a trainer in this process."""
    with launch_environment("cpu"):
        inputs = prepare(settings)
        with join_processes("cpu") as processes:
            drafter = inputs.build_drafter()
            trainer = Trainer(
                drafter, reader_of(inputs, drafter), sampler_of(inputs), settings, processes
            )
            try:
                yield trainer
            finally:
                trainer.engine.destroy()


def reader_of(inputs: RunInputs, drafter: JakiroDrafter) -> TargetReader:
    settings = inputs.settings
    dtype = TORCH_DTYPES[settings.engine.dtype]
    return TargetReader(inputs.target, drafter, settings.data.sequence_length, dtype)


def sampler_of(inputs: RunInputs) -> Sampler:
    settings = inputs.settings
    rule = anchor_rule(settings)
    return Sampler(
        inputs.sequences, sequences_per_step=settings.batch.global_batch_size, rule=rule, seed=0
    )


def storage_bytes(tensors: list[torch.Tensor]) -> int:
    """Return the number of bytes of the tensors' storages; shared storages are counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def kept_by(engine: Any) -> tuple[int, int]:
    """Return the bytes of an engine's parameters, and of its master weights and moments."""
    parameters = list(engine.module.parameters())
    own = [getattr(parameter, "ds_tensor", parameter) for parameter in parameters]
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    masters = [key for key in optimizer.state if all(key is not other for other in parameters)]
    moments = [
        part for state in optimizer.state.values() for part in state.values() if part.ndim > 0
    ]
    return storage_bytes([part.data for part in own]), storage_bytes([*masters, *moments])


@pytest.mark.parametrize(
    ("engine", "optimizer"),
    [
        ({"zero_stage": 0}, {}),
        pytest.param({"zero_stage": 0}, {"kind": "muon"}, marks=pytest.mark.slow),
        pytest.param({"zero_stage": 1}, {}, marks=pytest.mark.slow),
        ({"zero_stage": 2, "dtype": "bf16"}, {}),
        pytest.param({"zero_stage": 3, "dtype": "bf16"}, {}, marks=pytest.mark.slow),
    ],
    ids=["zero 0", "muon", "zero 1", "zero 2 in bf16", "zero 3 in bf16"],
)
@pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated:FutureWarning")
def test_parameters_and_states_are_those_of_a_real_engine(
    workshop: Path, engine: dict[str, object], optimizer: dict[str, object]
) -> None:
    settings = tiny_run(workshop, engine=engine, optimizer=optimizer)
    with trainer_of(settings) as trainer:
        trainer.step(0)
        parameters, states = kept_by(trainer.engine)
    estimated = estimate(settings, num_processes=1).states
    assert estimated.parameters == pytest.approx(parameters, rel=1e-3)
    assert estimated.optimizer == pytest.approx(states, rel=1e-3)
    assert estimated.device > parameters + states


def test_zero_divides_states_gradients_and_parameters_among_the_processes(workshop: Path) -> None:
    target = target_on_meta(tiny_run(workshop).target)

    def of(num_processes: int, **engine: object) -> Any:
        settings = tiny_run(workshop, batch={"global_batch_size": 8}, engine=engine)
        module = TrainingModule(drafter_on_meta(settings, target), settings.objective)
        return state_bytes(module, settings, num_processes)

    whole = of(4, zero_stage=0)
    states, gradients, parameters = (of(4, zero_stage=stage) for stage in (1, 2, 3))
    count = whole.parameters // 4
    assert states.optimizer == pytest.approx(12 * count / 4, abs=100)  # master weights, two moments
    assert states.gradients > gradients.gradients == pytest.approx(2 * 4 * count / 4, abs=100)
    assert states.parameters == pytest.approx(whole.parameters, abs=100)
    small = sum(
        part.numel() for part in drafter_on_meta(tiny_run(workshop), target).parameters()
    )  # ZeRO 3 also keeps such small parameters whole in each process
    assert parameters.parameters == pytest.approx(4 * (count / 4 + small), abs=200)
