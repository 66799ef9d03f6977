"""DeepSpeed's configuration, generated from the settings of a run."""

from typing import Any

from jakiro.utils.pretrained import choose_device
from training.config import EngineSettings, TrainSettings


def build_deepspeed_config(
    settings: TrainSettings, num_processes: int, device: str | None = None
) -> dict[str, Any]:
    """Return DeepSpeed's configuration of a run.

    The configuration names no optimizer, because a torch optimizer is passed to DeepSpeed as an
    object, even if the optimizer states are offloaded to main memory. DeepSpeed's own CPU optimizer
    would have to compile an extension for vectorization, but torch's fused AdamW is already
    vectorized.

    Args:
        device: "cpu" or "cuda"; None for the device that `engine.device` selects on this machine.
    """
    batch, engine = settings.batch, settings.engine
    # Without ZeRO, DeepSpeed's optimizer for half precision takes a step with empty gradients when
    # it is built. That step would spoil Adam's bias correction.
    stage = engine.zero_stage if engine.dtype == "fp32" else max(engine.zero_stage, 1)
    return {
        "train_batch_size": batch.global_batch_size,
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.accumulation(num_processes),
        "gradient_clipping": settings.optimizer.max_grad_norm,
        "zero_optimization": {"stage": stage} | _offload(engine, device),
        "bf16": {"enabled": engine.dtype == "bf16"},
        "fp16": {"enabled": engine.dtype == "fp16"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }


def _offload(engine: EngineSettings, device: str | None) -> dict[str, Any]:
    """Return the options that keep tensors in main memory, which is pinned if a GPU is used."""
    kind = device or choose_device(engine.device).type
    main_memory = {"device": "cpu", "pin_memory": kind == "cuda"}
    wanted = {
        "offload_optimizer": engine.offload_optimizer,
        "offload_param": engine.offload_parameters,
    }
    return {name: main_memory for name, is_wanted in wanted.items() if is_wanted}
