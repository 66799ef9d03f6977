"""Learns online how often candidates of several sources are right, given what they say of it."""

from threading import Lock

import numpy as np
from jaxtyping import Bool, Float64, Int64

# Of a candidate's own conditional probability; candidates between two of them count alike.
EDGES = np.array([0.01, 0.03, 0.06, 0.1, 0.17, 0.25, 0.35, 0.5, 0.65, 0.8, 0.92])
DEPTHS = 3  # deeper candidates count alike


class Calibration:
    """Running estimates by source, depth and score, of fixed size; threads may share them.

    Each says how often a candidate is right of whose parent that is known. Until something was
    seen it is the candidate's own score, times the trust in its source.

    Args:
        trust: in each source.
        doubt: trials that the beginning counts for.
        memory: trials after which an observation weighs 1/e.
    """

    def __init__(self, trust: tuple[float, ...], doubt: float, memory: float) -> None:
        self.trust = np.array(trust)
        self.doubt = doubt
        self.memory = memory
        self._counts = np.zeros((2, len(trust), DEPTHS, len(EDGES) + 1))  # hits, trials
        self._lock = Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of the counts, however much is learnt."""
        return self._counts.nbytes

    def rates(
        self,
        sources: Int64[np.ndarray, " n"],
        depths: Int64[np.ndarray, " n"],
        scores: Float64[np.ndarray, " n"],
    ) -> Float64[np.ndarray, " n"]:
        """Return how often such candidates are right if their parents are.

        Args:
            sources: of the candidates.
            depths: of the candidates, from 1.
            scores: their conditional probabilities, as their sources say.
        """
        with self._lock:
            hits, trials = self._counts[:, *_cells(sources, depths, scores)]
        return (hits + self.doubt * self.trust[sources] * scores) / (trials + self.doubt)

    def add(
        self,
        sources: Int64[np.ndarray, " n"],
        depths: Int64[np.ndarray, " n"],
        scores: Float64[np.ndarray, " n"],
        is_right: Bool[np.ndarray, " n"],
    ) -> None:
        """Take in what became of candidates whose parents were right."""
        cells = _cells(sources, depths, scores)
        with self._lock:
            # What was seen before fades where something new is seen.
            kept = np.zeros(self._counts.shape[1:])
            np.add.at(kept, cells, 1.0)
            self._counts *= np.exp(-kept / self.memory)
            np.add.at(self._counts[0], cells, is_right.astype(float))
            np.add.at(self._counts[1], cells, 1.0)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._counts.fill(0.0)


def _cells(
    sources: Int64[np.ndarray, " n"],
    depths: Int64[np.ndarray, " n"],
    scores: Float64[np.ndarray, " n"],
) -> tuple[
    Int64[np.ndarray, " n"],
    Int64[np.ndarray, " n"],
    Int64[np.ndarray, " n"],
]:
    return sources, np.minimum(depths, DEPTHS) - 1, np.searchsorted(EDGES, scores)
