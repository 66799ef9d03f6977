"""Targets other than that of the drafter, and targets on several devices, are refused."""

from types import SimpleNamespace
from typing import Any

import pytest
from helpers.models import tiny_drafter, tiny_llama

from inference.serving.vllm_plugin.checks import check_config
from jakiro.errors import JakiroError, TargetMismatch, TargetNotSupported
from jakiro.target.adapter import TargetAdapter


def _vllm_config(hidden: int = 32, vocab: int = 61, layers: int = 3, **parallel: int) -> Any:
    """Return the part of vLLM's config that is checked; tests/vllm checks the real one."""
    model = SimpleNamespace(
        get_hidden_size=lambda: hidden,
        get_vocab_size=lambda: vocab,
        get_total_num_hidden_layers=lambda: layers,
    )
    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1} | parallel
    return SimpleNamespace(model_config=model, parallel_config=SimpleNamespace(**sizes))


def test_the_target_of_the_drafter_is_accepted() -> None:
    check_config(tiny_drafter(TargetAdapter(tiny_llama())).config, _vllm_config())


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"hidden": 64}, TargetMismatch, r"hidden size differs\); expected: 32"),
        ({"vocab": 60}, TargetMismatch, r"vocabulary size differs\); expected: 61.*got: 60"),
        ({"layers": 4}, TargetMismatch, r"number of layers differs\); expected: 3"),
        ({"tensor_parallel_size": 2}, TargetNotSupported, r"--tensor-parallel-size 1; got: 2"),
        ({"pipeline_parallel_size": 2}, TargetNotSupported, r"--pipeline-parallel-size 1; got: 2"),
    ],
)
def test_what_the_drafter_cannot_be_used_with_is_named(
    changes: dict[str, int], error: type[JakiroError], message: str
) -> None:
    with pytest.raises(error, match=message):
        check_config(tiny_drafter(TargetAdapter(tiny_llama())).config, _vllm_config(**changes))
