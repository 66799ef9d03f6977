"""What vLLM cannot do with a drafter is refused by name: targets, devices, settings, states."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.models import tiny_drafter, tiny_llama

from inference.vllm_plugin.checks import (
    check_config,
    check_draft_ids,
    check_states,
)
from jakiro.errors import (
    CheckpointError,
    ConfigError,
    JakiroError,
    TargetMismatch,
    TargetNotSupported,
)
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.files import fingerprint


def _vllm_config(hidden: int = 32, vocab: int = 61, layers: int = 3, **changes: Any) -> Any:
    """Return the part of vLLM's config that is checked; tests/vllm checks the real one."""
    model = SimpleNamespace(
        get_hidden_size=lambda: hidden,
        get_vocab_size=lambda: vocab,
        get_total_num_hidden_layers=lambda: layers,
    )
    values = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "method": "eagle3",
        "use_local_argmax_reduction": False,
    } | changes
    others = SimpleNamespace(**values)
    return SimpleNamespace(model_config=model, parallel_config=others, speculative_config=others)


def test_the_target_of_the_drafter_is_accepted() -> None:
    check_config(tiny_drafter(TargetAdapter(tiny_llama())).config, _vllm_config())


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"hidden": 64}, TargetMismatch, r"hidden size differs\); expected: 32"),
        ({"vocab": 60}, TargetMismatch, r"vocabulary size differs\); expected: 61.*got: 60"),
        ({"layers": 4}, TargetMismatch, r"number of layers differs\); expected: 3"),
        ({"tensor_parallel_size": 2}, TargetNotSupported, "--tensor-parallel-size 1"),
        ({"pipeline_parallel_size": 2}, TargetNotSupported, "--pipeline-parallel-size 1"),
        ({"method": "eagle"}, ConfigError, '"method": "eagle3" in --speculative-config'),
        ({"use_local_argmax_reduction": True}, ConfigError, 'argmax_reduction": false'),
    ],
)
def test_what_the_drafter_cannot_be_used_with_is_named(
    changes: dict[str, Any], error: type[JakiroError], message: str
) -> None:
    with pytest.raises(error, match=message):
        check_config(tiny_drafter(TargetAdapter(tiny_llama())).config, _vllm_config(**changes))


def test_a_target_that_supplies_too_few_hidden_states_is_refused() -> None:
    check_states((0, 2, 3), 96, 32)
    with pytest.raises(
        TargetNotSupported, match=r"hidden states \[0, 2, 3\] of width 32; got: .*64"
    ):
        check_states((0, 2, 3), 64, 32)


def test_a_draft_vocabulary_that_was_shifted_or_permuted_is_refused() -> None:
    ids = 2 * torch.arange(23) + 3
    expected = fingerprint(ids.tolist())
    check_draft_ids(ids.clone(), expected)
    check_draft_ids(None, None)
    for wrong in (ids + 1, ids.roll(1), ids.flip(0), ids[:-1], torch.zeros_like(ids)):
        with pytest.raises(CheckpointError, match=f"checksum {expected}.*export it again"):
            check_draft_ids(wrong, expected)
    with pytest.raises(CheckpointError, match="damaged"):
        check_draft_ids(ids, None)  # an export without the fact
