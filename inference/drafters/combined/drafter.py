"""Two drafters under one budget of nodes: a model's tree, and continuations of the text beside it.

What the model draws is tried first, by the multi-round rule; what is chosen beside it follows, as
point masses on the residual. How much is drawn is decided before anything is.
"""

from jaxtyping import Int
from torch import Tensor

from inference.drafters.aded.drafter import AdedDrafter
from inference.drafters.combined.knowledge import CombinedSettings, Knowledge
from inference.drafters.combined.session import CombinedSession
from inference.drafters.lookup import LookupDrafter
from inference.drafters.small_lm import SmallLMDrafter
from inference.drafters.trained.drafter import TrainedDrafter
from inference.protocol import EncodedMemory, RequestCounter
from inference.sampling import Sampling
from jakiro.target.adapter import StepOutput


class CombinedDrafter:
    """Drafts with a model and beside it from the text; threads may share it.

    Proposers of candidates are those of the first drafter, and one more for what only the second
    one has.

    Args:
        first: whose candidates come first: a trained drafter or a small language model.
        second: that continues the root and some of the first one's candidates.
        settings: how they share a tree.
    """

    def __init__(
        self,
        first: TrainedDrafter | SmallLMDrafter,
        second: AdedDrafter | LookupDrafter,
        settings: CombinedSettings | None = None,
    ) -> None:
        self.first, self.second = first, second
        self.settings = settings or CombinedSettings()
        self.needs = first.needs
        self.hidden_states = first.hidden_states
        self.version = first.version
        # What is learnt of both is this drafter's own; the second one may be shared.
        self.request_counter = second.request_counter or RequestCounter()
        self.bytes_per_token = first.bytes_per_token + second.bytes_per_token
        self.max_nodes = self.settings.num_nodes or first.max_nodes
        self.max_depth = max(first.max_depth, second.max_depth)
        self.second_id = 1
        if isinstance(first, TrainedDrafter):
            self.second_id = first.model.config.settings.experts.num_experts
        self._knowledge = [Knowledge(self.settings) for _ in range(3)]
        self._num_resets = self.request_counter.num_resets

    def new_session(self, sampling: Sampling, capacity: int, batch: int = 1) -> CombinedSession:
        """Return a session for `batch` sequences of up to `capacity` tokens."""
        return CombinedSession(
            self.first.new_session(sampling, capacity, batch),
            self.second.new_session(sampling, capacity, batch),
            self.settings,
            sampling,
            self.knowledge,
            self.second_id,
            self.max_depth,
        )

    def knowledge(self, do_sample: bool, is_sampled: bool) -> Knowledge:
        """Return what was learnt where tokens, and perhaps candidates, are drawn or not.

        Whoever lets a shared second drafter count from 0 again lets this one forget, too.
        """
        if self.request_counter.num_resets != self._num_resets:
            self._forget()
        return self._knowledge[do_sample + is_sampled]

    def encode_memory(
        self, output: StepOutput, rows: Int[Tensor, "batch rows"] | None = None
    ) -> EncodedMemory:
        """Encode as the first drafter does."""
        return self.first.encode_memory(output, rows)

    def reset(self) -> None:
        """Forget what was learnt from requests."""
        self.first.reset()
        self.second.reset()
        if self.second.request_counter is None:
            self.request_counter.reset()
        self._forget()

    def _forget(self) -> None:
        self._num_resets = self.request_counter.num_resets
        for one in self._knowledge:
            one.clear()
