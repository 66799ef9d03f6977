"""Checks of vLLM's settings, and of what its target supplies, against what a drafter needs."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from jakiro.config import JakiroConfig
from jakiro.errors import CheckpointError, ConfigError, TargetMismatch, TargetNotSupported
from jakiro.utils.files import fingerprint

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check_config(config: JakiroConfig, vllm_config: "VllmConfig") -> None:
    """Raise an error unless vLLM serves the target of a drafter, in a way that drafters support."""
    _check_speculation(vllm_config)
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
            )
    for name, size in (
        ("--tensor-parallel-size", parallel.tensor_parallel_size),
        ("--pipeline-parallel-size", parallel.pipeline_parallel_size),
    ):
        if size != 1:
            raise TargetNotSupported(
                f"drafters of Jakiro run in vLLM on a single device only, with {name} 1",
                remedy="serve several replicas with --data-parallel-size",
            )


def _check_speculation(vllm_config: "VllmConfig") -> None:
    speculation = vllm_config.speculative_config
    for name, expected in (("method", "eagle3"), ("use_local_argmax_reduction", False)):
        if getattr(speculation, name) != expected:
            raise ConfigError(
                f'drafters of Jakiro need "{name}": {json.dumps(expected)} in --speculative-config',
                remedy="serve with the command that `jakiro export` prints",
            )


def check_states(layers: Sequence[int], width: int, hidden: int) -> None:
    """Raise an error unless vLLM's target supplies all hidden states that a drafter reads."""
    if width != len(layers) * hidden:
        raise TargetNotSupported(
            "vLLM's implementation of the target does not supply all hidden states of the drafter",
            expected=f"hidden states {list(layers)} of width {hidden}",
            got=f"a total width of {width}",
        )


def check_draft_ids(draft_ids: Tensor | None, expected: str | None) -> None:
    """Raise an error unless a drafter has the draft vocabulary that was exported."""
    got = None if draft_ids is None else fingerprint(draft_ids.tolist())
    if got != expected:
        raise wrong_weights(f"draft_ids with the checksum {expected}", got)


def wrong_weights(expected: str, got: object) -> CheckpointError:
    return CheckpointError(
        "the exported drafter is damaged",
        expected=expected,
        got=got,
        remedy="export it again with `jakiro export --to vllm`",
    )
