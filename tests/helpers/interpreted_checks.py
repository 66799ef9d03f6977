"""Compares the sibling checks in Triton with those in torch; run with TRITON_INTERPRET=1."""

import torch
from helpers.supports import random_support

from inference.engine.sibling_checks import check_by_torch
from inference.engine.sibling_checks_triton import check_by_triton
from inference.engine.siblings import Siblings
from inference.engine.support import Support


def compare(device: str = "cpu") -> None:
    """Compare both on random trees, and on probabilities that are not numbers."""
    for share, is_recorded in ((0.0, False), (0.0, True), (0.5, True), (1.0, True)):
        support, siblings = random_support(20, share, is_recorded=is_recorded)
        broken = support._replace(
            target=support.target.masked_fill(support.target > 0.4, torch.nan)
        )
        for own in (support, broken):
            fields = [None if field is None else field.to(device) for field in own]
            there = Support(*fields), Siblings(*(field.to(device) for field in siblings))
            results = zip(check_by_triton(*there), check_by_torch(*there), strict=True)
            for got, expected in results:
                torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-15, equal_nan=True)


if __name__ == "__main__":
    compare()
