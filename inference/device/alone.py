"""A drafter that writes token by token, without verdicts."""

from collections.abc import Sequence

import torch

from inference.device.drafting import DeviceDrafting
from inference.draft_tree import ROOT
from inference.drafters.base import TokenSession
from inference.drafters.trained.chain import TrainedChain
from inference.drafters.trained.drafter import TrainedSession
from inference.protocol import Budget
from inference.remote.provisional import ProvisionalToken, sampled_token
from inference.sampling.random_numbers import StepRandom, StreamKey, random_stream

_ALONE = 2  # stream of random numbers, besides those that accept and draft in a decoding step


class AloneWriter:
    """Provisional tokens after verified ones, from the session of the drafter.

    Args:
        attempt: number of times that this text has been continued alone, including this time.
    """

    def __init__(
        self,
        drafting: DeviceDrafting,
        token_ids: Sequence[int],
        step: int,
        attempt: int,
        most: int,
    ) -> None:
        self._drafting = drafting
        self._verified = list(token_ids)
        self._step_key = drafting.sampling.stream_key(step)
        self._attempt = attempt
        self._count = 0
        self._chain: TrainedChain | None = None
        self._unread: list[int] = []  # verified tokens after the root of the chain
        if isinstance(drafting.session, TrainedSession):
            self._start_chain(drafting.session, most)
        else:
            drafting.advance(self._verified)

    @torch.inference_mode()
    def _start_chain(self, session: TrainedSession, most: int) -> None:
        """Let the path begin at the last token before which all memory is here.

        If this token is far back, as without the memory of the prompt, nothing is written: the
        drafter would write nonsense.
        """
        root = self._drafting.num_readable
        self._unread = self._verified[root + 1 :]
        if root > 0 and len(self._unread) <= self._drafting.limits.largest:
            self._drafting.advance(self._verified[: root + 1])
            self._chain = TrainedChain(session, len(self._unread) + most)

    @torch.inference_mode()
    def next(self, provisional: Sequence[int]) -> ProvisionalToken | None:
        """Return a token after provisional ones; None if the drafter has none."""
        session = self._drafting.session
        if session is None:
            return None
        self._count += 1
        key = alone_key(self._step_key, self._attempt, self._count)
        if isinstance(session, TokenSession):  # which must not learn from provisional text
            found = session.draft_below(0, provisional, 1, 1).token_ids
            return ProvisionalToken(int(found[0])) if len(found) else None
        random = StepRandom([key], self._drafting.device)
        if isinstance(session, TrainedSession):
            if self._chain is None:
                return None
            tree = self._chain.propose([*self._unread, *provisional], random).sequence_tree()
        else:
            self._drafting.advance([*self._verified, *provisional])
            tree = session.propose(Budget(1, 1), random).sequence_tree()
        if not tree.children.get(ROOT):
            self._chain = None  # it cannot be asked twice about the same tokens
            return None
        if tree.sampled:
            ids, probs = tree.draft_distribution(ROOT)
            return sampled_token(
                ids.cpu().numpy(), probs.double().cpu().numpy(), random_stream(*key)
            )
        return ProvisionalToken(tree.token_ids[tree.children[ROOT][0]])

    def stop(self) -> None:
        """Let the drafter forget the provisional tokens, as far as it has stored them."""
        self._drafting.rollback(len(self._verified) - 1)


def alone_key(step_key: StreamKey, attempt: int, number: int) -> StreamKey:
    """Return the key of the random numbers of a provisional token, which nothing else uses.

    Whether earlier provisional tokens were kept depends on their random numbers, so these numbers
    must not select other candidates.

    Args:
        attempt: number of times that the device has begun to write alone in this text.
    """
    return (*step_key, _ALONE, attempt, number)
