"""Draft distributions with integer weights, which both ends read alike, bit for bit.

Acceptance is exact only for the distribution that candidates were sampled from. A distribution is
therefore quantized before anything is sampled from it, and is sent as integers (as in arXiv
2507.00605). `TOTAL` is a power of two, so each probability is exact in float32 and in float64.
"""

import numpy as np
from jaxtyping import Float64, Int64

TOTAL = 1 << 15  # sum of the weights of a distribution; every weight fits into 16 bits


def quantized(probs: Float64[np.ndarray, "*batch m"]) -> Int64[np.ndarray, "*batch m"]:
    """Return integer weights that sum to `TOTAL`, by the method of largest remainders.

    Args:
        probs: distributions over the last axis, which need not be normalized.
    """
    sums = probs.sum(axis=-1, keepdims=True)
    if not (np.isfinite(sums).all() and (probs >= 0).all() and (sums > 0).all()):
        raise ValueError("a distribution needs finite probabilities, one of them above 0")
    shares = probs / sums * TOTAL
    weights = np.floor(shares).astype(np.int64)
    missing = TOTAL - weights.sum(axis=-1, keepdims=True)
    order = np.argsort(weights - shares, axis=-1, kind="stable")
    rank = np.argsort(order, axis=-1, kind="stable")
    return np.asarray(weights + (rank < missing), np.int64)


def probabilities(weights: Int64[np.ndarray, "*batch m"]) -> Float64[np.ndarray, "*batch m"]:
    """Return the exact probabilities of integer weights."""
    return np.asarray(weights / TOTAL, np.float64)
