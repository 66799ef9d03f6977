"""Penalties of tokens that a text already contains, as OpenAI's interface defines them."""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import LogitsProcessor


class TokenPenalties(LogitsProcessor):
    """Subtracts numbers from the logits of tokens that were generated before.

    A token that occurs n times after the prompt loses `frequency * n`, and `presence` if n > 0.
    Negative numbers favor such tokens. Transformers has no processor with this rule.

    Args:
        prompt_length: number of tokens of the prompt, which do not count.
        frequency: number to subtract for each occurrence.
        presence: number to subtract once.
    """

    def __init__(self, prompt_length: int, frequency: float = 0.0, presence: float = 0.0) -> None:
        self.prompt_length = prompt_length
        self.frequency = frequency
        self.presence = presence

    def __call__(
        self, input_ids: Int[Tensor, "batch tokens"], scores: Float[Tensor, "batch vocab"]
    ) -> Float[Tensor, "batch vocab"]:
        """Return the logits after the penalties.

        Args:
            input_ids: all tokens so far, prompts included.
            scores: logits of the next token.
        """
        new = input_ids[:, self.prompt_length :]
        ones = torch.ones_like(new, dtype=scores.dtype)
        counts = torch.zeros_like(scores).scatter_add_(1, new, ones)
        return scores - self.frequency * counts - self.presence * (counts > 0)
