"""A batch with a fixed number of places, which requests take and leave at any time."""

from collections.abc import Sequence

import torch

from inference.engine.batch import DecodeBatch
from inference.engine.context import Context, most_per_step
from inference.engine.policy import AlwaysDraft, DraftPolicy
from inference.engine.prefill import Prefill
from inference.engine.request import Request, SequenceState
from inference.protocol import Budget, Drafter
from inference.sampling.options import Sampling
from jakiro.target.adapter import TargetAdapter


class Lane(DecodeBatch):
    """Requests that are decoded together in places that are allocated once.

    A request gets the same tokens as alone, up to rounding, unless the drafter or the policy learns
    from requests. A sequence that fails leaves with its error, and the others continue.

    Args:
        sampling: options with which all requests must be able to share a session of the drafter.
        captured: whether steps are recorded as CUDA graphs on a GPU (see `CapturedSteps`).
        policy: policy that decides when and how much to draft; None to draft in every step, as much
            as the drafter allows. With a policy that never drafts, the drafter takes neither memory
            nor time.
    """

    def __init__(
        self,
        target: TargetAdapter,
        drafter: Drafter | None,
        sampling: Sampling,
        places: int,
        capacity: int,
        policy: DraftPolicy | None = None,
        threads: int | None = None,
        *,
        captured: bool = False,
    ) -> None:
        self.sampling = sampling
        self.places = places
        self.capacity = capacity
        self._sharing = drafter  # decides which requests the lane takes
        self._draft_policy = policy or AlwaysDraft.with_all_of(drafter)
        self._policies: dict[int, DraftPolicy] = {}  # policies by number of sequences
        policies = [self._policy_for(count) for count in (1, places)]
        drafts = any(
            not isinstance(policy, AlwaysDraft) or policy.budget is not None for policy in policies
        )
        drafter = drafter if drafts else None
        # A captured step that is discarded may have written further tokens.
        spare = most_per_step(drafter) if captured else 0
        context = Context(target, drafter, sampling, places, capacity + spare)
        self.num_bytes = _num_bytes(context)
        super().__init__(context, self._policy_for(places), threads)
        if captured:
            from inference.engine.captured import CapturedSteps

            self.captured = CapturedSteps(context)
            self.captured.attach(self)
        with torch.inference_mode():
            self._select([])

    @property
    def prompt_bytes(self) -> int:
        """The size of the caches in which the longest prompt is read, in bytes.

        These caches are freed when the prompt has been read, and are not part of `num_bytes`.
        """
        return self.num_bytes // self.places

    @property
    def num_free(self) -> int:
        return self.places - len(self.live)

    def can_take(self, request: Request) -> bool:
        """Return whether the drafter can draft for a request together with those of this lane."""
        drafter = self._sharing
        return drafter is None or drafter.can_share(self.sampling, request.sampling)

    def prefill_of(self, sequences: Sequence[SequenceState]) -> Prefill:
        """Return a prefill of the prompt of one sequence, or of several with the same prompt.

        The prompt is read in a context of its own. The drafter's session processes each chunk as
        soon as the target has read it.
        """
        first = sequences[0]
        sampling, length = first.request.sampling, len(first.token_ids)
        context = Context(self.target, self.drafter, sampling, 1, length)
        return Prefill(context, [first], follows=True)

    def next_budget(self) -> Budget | None:
        """Return the limits for this number of sequences; for a full lane if any of them samples.

        Sampled text depends on the trees, and must not depend on the number of sequences.
        """
        samples = any(state.request.sampling.do_sample for state in self.live)
        self.policy = self._policy_for(self.places if samples else len(self.live))
        return super().next_budget()

    def _policy_for(self, count: int) -> DraftPolicy:
        if count not in self._policies:
            self._policies[count] = self._draft_policy.new_run(self.sampling, count)
        return self._policies[count]

    @torch.inference_mode()
    def remove(self, sequences: Sequence[SequenceState]) -> None:
        """Free the places of sequences between two steps, complete or not.

        After captured steps, complete sequences leave by themselves after the step that is under
        way, which is discarded only if any other sequence has a place.
        """
        gone = {id(state) for state in sequences}
        if self.captured is not None:
            if all(state.is_finished for state in self.live if id(state) in gone):
                return
            self.captured.discard_step()
        self._keep([id(state) not in gone for state in self.live])

    def close(self) -> None:
        if self.captured is not None:
            self.captured.recorded.clear()
        self.live = []
        self.context.close()


def _num_bytes(context: Context) -> int:
    drafter = context.drafter
    per_token = context.cache.bytes_per_token + (drafter.bytes_per_token if drafter else 0)
    states = context.cache.states
    of_states = 0 if states is None else states.num_bytes
    return len(context.lengths) * context.cache.capacity * per_token + of_states
