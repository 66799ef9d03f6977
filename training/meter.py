"""Sums of loss terms over steps and processes, and the means that people read."""

from typing import Any

import torch
from torch import Tensor

from training.objectives import LossTerms
from training.processes import Processes

_PER_LEVEL = {"token", "feature", "contrast", "correct", "level_count"}


class Meter:
    """Adds up loss terms on the device; nothing waits for the device until they are read.

    Args:
        processes: whose sums are joined when read.
        num_levels: levels that the loss terms have.
    """

    def __init__(self, processes: Processes, num_levels: int) -> None:
        self._processes = processes
        self._sizes = [num_levels if name in _PER_LEVEL else 1 for name in LossTerms._fields] + [1]
        self._sums = self._zeros()

    def add(self, terms: LossTerms, num_tokens: int) -> None:
        """Add the sums of one micro-batch of `num_tokens` tokens, padding not counted."""
        columns = [column.detach().reshape(-1).double() for column in terms]
        self._sums += torch.cat([*columns, torch.full_like(columns[0], num_tokens)])

    def read(self) -> dict[str, Any]:
        """Return means per position since the last reading, and the number of tokens read.

        All processes must call it.
        """
        columns = self._processes.sum(self._sums).split(self._sizes)
        self._sums = self._zeros()
        *sums, num_tokens = [column.tolist() for column in columns]
        terms: Any = LossTerms(*sums)
        count = max(terms.num_positions[0], 1.0)
        return {
            "loss": terms.total[0] / count,
            "levels": [
                {
                    "token": token / max(number, 1.0),
                    "feature": feature / max(number, 1.0),
                    "contrast": contrast / max(number, 1.0),
                    "agreement": correct / max(number, 1.0),
                }
                for token, feature, contrast, correct, number in zip(
                    terms.token,
                    terms.feature,
                    terms.contrast,
                    terms.correct,
                    terms.level_count,
                    strict=True,
                )
            ],
            "router_imbalance": terms.balance[0] / count,
            "positions": int(terms.num_positions[0]),
            "tokens": int(num_tokens[0]),
        }

    def count_tokens(self) -> int:
        """Return the number of tokens since the last reading, which stays the last one.

        All processes must call it.
        """
        return int(self._processes.sum(self._sums[-1:].clone()).item())

    def _zeros(self) -> Tensor:
        return torch.zeros(sum(self._sizes), dtype=torch.float64, device=self._processes.device)
