"""A random cycle over the vocabulary, which determines every token that the target emits."""

import torch
from jaxtyping import Int
from torch import Tensor


class Cycle:
    """A permutation of all tokens that consists of a single cycle: each token has a successor.

    Args:
        vocab_size: number of tokens.
        device: device of the table of successors.
        seed: seed of the permutation.
    """

    def __init__(self, vocab_size: int, device: torch.device, seed: int = 0) -> None:
        order = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))
        successor = torch.empty_like(order)
        successor[order] = order.roll(-1)
        self.successor = successor.to(device)
        self._on_host: list[int] = successor.tolist()

    def following(self, token: int, count: int) -> list[int]:
        """Return the next tokens after a token.

        Args:
            token: token before the first returned token.
            count: number of tokens.
        """
        tokens: list[int] = []
        for _ in range(count):
            token = self._on_host[token]
            tokens.append(token)
        return tokens

    def levels(self, root: Int[Tensor, "batch 1"], depth: int) -> Int[Tensor, "batch depth"]:
        """Return the right tokens at depths 1 to `depth`, without waiting for the device.

        Args:
            root: token at depth 0 of each sequence.
            depth: number of levels.
        """
        tokens = [root]
        for _ in range(depth):
            tokens.append(self.successor[tokens[-1]])
        return torch.cat(tokens[1:], dim=1)
