"""Greedy decoding of a Hugging Face model with a static cache, as a fast baseline.

A step reads and writes only tensors with fixed addresses and never waits for the device, so it can
be captured in a CUDA graph. On a CPU, the same step is called directly.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel, StaticCache

from jakiro.target.cache_argument import cache_argument

PREFILL_CHUNK = 1024  # number of prompt tokens per forward pass


class StaticDecoding:
    """Sequences of equal length that are decoded together, one token at a time.

    The masks are passed to the model, so that neither the model nor the cache determines them on
    the host.

    Args:
        model: target.
        prompts: token ids of the prompts.
        capacity: number of slots of the cache, for prompts and new tokens.
        compile_forward: function that compiles the model's `forward`; None to leave it as it is.
            Prompts are not read by the compiled function.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Int[Tensor, "batch prompt"],
        capacity: int,
        compile_forward: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    ) -> None:
        self.model: Any = model
        self.is_compiled = compile_forward is not None
        self.cache_argument = cache_argument(model)
        self.forward = self.model.forward
        if compile_forward is not None:
            self.forward = compile_forward(self.forward)
        self.cache = StaticCache(config=model.config, max_cache_len=capacity)
        self.length = prompts.shape[1]
        self.slots = torch.arange(capacity, device=prompts.device)
        # The static tensors: tokens so far, last tokens with their positions, and soundness.
        self.history = torch.zeros(
            len(prompts), capacity + 1, dtype=torch.long, device=prompts.device
        )
        self.history[:, : self.length] = prompts
        self.token = prompts[:, -1:].clone()
        self.position = torch.full_like(self.token, self.length - 1)
        self.is_finite = torch.ones_like(self.token[:, 0], dtype=torch.bool)
        self._read(prompts[:, :-1])

    @torch.no_grad()
    def step(self) -> None:
        """Decode one token of each sequence, without waiting for the device."""
        if self.is_compiled:
            torch.compiler.cudagraph_mark_step_begin()
        logits = self.forward(
            input_ids=self.token,
            position_ids=self.position,
            attention_mask=self._mask(self.position),
            use_cache=True,
            **{self.cache_argument: self.cache},
        ).logits
        best = logits[:, -1].max(dim=-1)
        self.is_finite.logical_and_(best.values.isfinite())
        self.history.scatter_(1, self.position + 1, best.indices[:, None])
        self.token.copy_(best.indices[:, None])
        self.position.add_(1)

    def new_tokens(self) -> list[list[int]]:
        """Return the tokens that were decoded for each sequence; waits for the device."""
        end = int(self.position[0, 0]) + 1
        tokens: list[list[int]] = self.history[:, self.length : end].tolist()
        return tokens

    def _read(self, token_ids: Tensor) -> None:
        """Read the prompts except their last tokens."""
        decoder = self.model.get_decoder()
        for start in range(0, token_ids.shape[1], PREFILL_CHUNK):
            chunk = token_ids[:, start : start + PREFILL_CHUNK]
            positions = torch.arange(start, start + chunk.shape[1], device=chunk.device)
            positions = positions.expand(len(chunk), -1)
            decoder(
                input_ids=chunk,
                position_ids=positions,
                attention_mask=self._mask(positions),
                use_cache=True,
                **{cache_argument(decoder): self.cache},
            )

    def _mask(self, positions: Int[Tensor, "batch queries"]) -> Tensor:
        """Return the slots that each query attends to [batch, 1, queries, slots]."""
        return (self.slots <= positions[:, :, None])[:, None]
