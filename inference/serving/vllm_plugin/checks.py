"""Checks of vLLM's settings against those that a drafter was exported for."""

from typing import TYPE_CHECKING

from jakiro.config import JakiroConfig
from jakiro.errors import TargetMismatch, TargetNotSupported

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check_config(config: JakiroConfig, vllm_config: "VllmConfig") -> None:
    """Raise an error unless vLLM serves the target of a drafter, on a single device.

    Args:
        config: config of the drafter.
        vllm_config: config of vLLM.

    Raises:
        TargetMismatch: a size of the target differs.
        TargetNotSupported: vLLM splits the target over several devices.
    """
    record = config.target_record
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    for name, expected, got in (
        ("hidden size", record.hidden_size, model.get_hidden_size()),
        ("vocabulary size", record.vocab_size, model.get_vocab_size()),
        ("number of layers", len(record.kv_widths), model.get_total_num_hidden_layers()),
    ):
        if expected != got:
            raise TargetMismatch(
                f"the drafter was exported for another target ({name} differs)",
                expected=f"{expected}, as in {record.name_or_path}",
                got=got,
                remedy="serve this target, or export a drafter for the served one",
            )
    for name, size in (
        ("--tensor-parallel-size", parallel.tensor_parallel_size),
        ("--pipeline-parallel-size", parallel.pipeline_parallel_size),
    ):
        if size != 1:
            raise TargetNotSupported(
                "drafters of Jakiro run in vLLM on a single device only",
                expected=f"{name} 1",
                got=size,
                remedy="serve several replicas with --data-parallel-size, or serve without a "
                "drafter",
            )
