"""The dictionary that DeepSpeed reads, generated so that nothing is written twice."""

from typing import Any

from training.config import TrainSettings


def build_deepspeed_config(settings: TrainSettings, num_processes: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration of a run.

    The optimizer is built by us and handed over: DeepSpeed's own would compile an extension.

    Args:
        settings: of the run.
        num_processes: over which the rows of a step are shared out.

    Raises:
        ConfigError: the rows of a step cannot be shared out evenly.
    """
    batch, engine = settings.batch, settings.engine
    # Without ZeRO, DeepSpeed's optimizer for half precision takes a step with empty gradients when
    # it is built, which spoils Adam's correction of its first averages.
    stage = engine.zero_stage if engine.dtype == "fp32" else max(engine.zero_stage, 1)
    return {
        "train_batch_size": batch.rows,
        "train_micro_batch_size_per_gpu": batch.micro_batch,
        "gradient_accumulation_steps": batch.accumulation(num_processes),
        "gradient_clipping": settings.optimizer.clip,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": engine.dtype == "bf16"},
        "fp16": {"enabled": engine.dtype == "fp16"},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }
