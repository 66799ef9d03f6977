"""A combination of two drafters in one tree: a model, and a training-free drafter.

The number of sampled nodes is fixed before sampling, so that acceptance stays exact.
"""

from collections.abc import Callable, Mapping
from threading import Lock

from inference.drafters.aded.drafter import AdedDrafter
from inference.drafters.combined.cascade import Cascades, DraftCosts
from inference.drafters.combined.knowledge import CombinedSettings, Knowledge
from inference.drafters.combined.session import CombinedSession
from inference.drafters.delegating import DelegatingDrafter
from inference.drafters.lookup import LookupDrafter
from inference.drafters.small_lm import SmallLMDrafter
from inference.drafters.trained.drafter import TrainedDrafter
from inference.protocol import AdaptiveDrafter, CostAware, RequestCounter, request_counter_of
from inference.sampling.options import Sampling
from inference.trees.shape import TreeShape


class CombinedDrafter(DelegatingDrafter, CostAware):
    """Drafter that combines a model and a training-free drafter in shared trees; thread-safe.

    The proposer ids of candidates are those of the first drafter, plus one id for candidates that
    only the second drafter proposes.

    Example:
        first = SmallLMDrafter(small_lm, target)
        drafter = CombinedDrafter(first, LookupDrafter())
        output = SpeculativeDecoder(target, drafter, tokenizer).generate("a b a", max_new_tokens=16)
    """

    def __init__(
        self,
        first: TrainedDrafter | SmallLMDrafter,
        second: AdedDrafter | LookupDrafter,
        settings: CombinedSettings | None = None,
    ) -> None:
        super().__init__(first)
        self.first, self.second = first, second
        self.settings = settings or CombinedSettings()
        # Rates and costs of a decoder, by which the first drafter drafts only where it saves time.
        self.cascades: Cascades | None = None
        # If other decoders also use the second drafter, they share its request counter.
        self._shared_counter = request_counter_of(second)
        self._counter = self._shared_counter or RequestCounter()
        self.request_counter = self._counter
        self.bytes_per_token = first.bytes_per_token + second.bytes_per_token
        self.second_id = 1
        if isinstance(first, TrainedDrafter):
            self.second_id = first.model.config.settings.experts.num_active
        self.proposer_names = (*first.proposer_names, *second.proposer_names)
        self._knowledge: dict[tuple[bool, TreeShape], Knowledge] = {}
        self._num_resets = self._counter.num_resets
        self._lock = Lock()

    @property
    def slow_part(self) -> TrainedDrafter | SmallLMDrafter:
        return self.first

    def use_costs(
        self, verify: Callable[[int], float], draft: Mapping[int, float]
    ) -> Callable[[], None]:
        """In later sessions, let the first drafter draft only where it saves time."""
        self.cascades = Cascades(DraftCosts(verify, draft))
        return self.cascades.clear

    @property
    def max_nodes(self) -> int:
        return self.settings.num_nodes or self.first.max_nodes

    @property
    def max_depth(self) -> int:
        return max(self.first.max_depth, self.second.max_depth)

    def new_session(self, sampling: Sampling, capacity: int, batch: int = 1) -> CombinedSession:
        return CombinedSession(
            self.first.new_session(sampling, capacity, batch),
            self.second.new_session(sampling, capacity, batch),
            self.settings,
            sampling,
            self.knowledge,
            self.second_id,
            self.max_depth,
            self.cascades,
        )

    def can_share(self, one: Sampling, other: Sampling) -> bool:
        """Return whether both share the first drafter's sessions and the learned statistics."""
        return one.do_sample == other.do_sample and self.first.can_share(one, other)

    def knowledge(self, do_sample: bool, shape: TreeShape) -> Knowledge:
        """Return the statistics for greedy decoding or sampling with trees of one shape.

        If the second drafter was reset separately, all statistics are discarded first.
        """
        key = do_sample, shape
        with self._lock:
            if self._counter.num_resets != self._num_resets:
                self._forget()
            if key not in self._knowledge:
                self._knowledge[key] = Knowledge(self.settings, shape)
            return self._knowledge[key]

    def reset(self) -> None:
        if isinstance(self.second, AdaptiveDrafter):
            self.second.reset()
        if self._shared_counter is None:
            self._counter.reset()
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        self._num_resets = self._counter.num_resets
        for knowledge in self._knowledge.values():
            knowledge.clear()
