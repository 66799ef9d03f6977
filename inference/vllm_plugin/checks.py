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


def _check_speculation(vllm_config: "VllmConfig") -> None:
    speculation = vllm_config.speculative_config
    for name, expected in (("method", "eagle3"), ("use_local_argmax_reduction", False)):
        got = getattr(speculation, name)
        if got != expected:
            raise ConfigError(
                "drafters of Jakiro need other settings of speculative decoding",
                expected=f'"{name}": {_json(expected)} in --speculative-config',
                got=_json(got),
                remedy="serve with the command that `jakiro export` prints",
            )


def _json(value: object) -> str:
    return json.dumps(value, default=str)


def check_states(layers: Sequence[int], width: int, hidden: int) -> None:
    """Raise an error unless vLLM's target supplies all hidden states that a drafter reads."""
    if width != len(layers) * hidden:
        raise TargetNotSupported(
            "vLLM's implementation of the target does not supply all hidden states of the drafter",
            expected=f"hidden states {list(layers)} of width {hidden}",
            got=f"a total width of {width}",
            remedy="train a drafter that reads other hidden states (drafter.trunk.fusion_layers, "
            "drafter.memory.layers)",
        )


def check_draft_ids(draft_ids: Tensor | None, expected: str | None) -> None:
    """Raise an error unless a drafter has the draft vocabulary that was exported."""
    got = None if draft_ids is None else fingerprint(draft_ids.tolist())
    if got != expected:
        raise wrong_weights(f"draft_ids with the checksum {expected}", got)


def wrong_weights(expected: str, got: object) -> CheckpointError:
    """Return the error for an export whose weights do not belong together."""
    return CheckpointError(
        "the exported drafter is damaged",
        expected=expected,
        got=got,
        remedy="export it again with `jakiro export --to vllm`",
    )
