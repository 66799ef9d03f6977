"""Search for the fastest draft trees on this machine, from measured costs and acceptance."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isqrt

from inference.autotune.costs import NODE_COUNTS, Costs, measure_costs, timed_passes
from inference.draft_tree import DraftTree
from inference.drafters.delegating import DelegatingDrafter, DelegatingSession
from inference.drafters.trained.drafter import TrainedDrafter
from inference.engine.loop import DecodeRun
from inference.engine.stats import DecodeStats
from inference.generation.preparation import prepare_requests
from inference.protocol import Budget, Drafter, DraftSession, VerifyResult
from inference.sampling.options import Sampling
from inference.sampling.random_numbers import StepRandom
from inference.trees.shape import TreePlan, TreeShape
from jakiro.drafter import JakiroDrafter
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.settings import Settings, validate_settings


@dataclass(frozen=True)
class StepRecord:
    """The ranks of the accepted nodes of a verified tree, from depth 1 on.

    The rank of a node is its index when all nodes of the tree are sorted by score; 0 is the best.
    """

    ranks: list[int]


class RecordingDrafter(DelegatingDrafter):
    """A wrapper that records every decoding step of a drafter."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        self.records: list[StepRecord] = []

    def new_session(self, sampling: Sampling, capacity: int, batch: int = 1) -> "RecordingSession":
        return RecordingSession(super().new_session(sampling, capacity, batch), self.records)


class RecordingSession(DelegatingSession):
    """A session that records, at each verification, the accepted nodes of its last tree."""

    def __init__(self, session: DraftSession, records: list[StepRecord]) -> None:
        super().__init__(session)
        self.records = records
        self.tree: DraftTree | None = None

    def propose(self, budget: Budget, random: StepRandom) -> DraftTree:
        self.tree = super().propose(budget, random)
        return self.tree

    def on_verified(self, result: VerifyResult) -> None:
        """Record the rank of each accepted node among the tree's nodes, by score."""
        if self.tree is not None:
            tree = self.tree.sequence_tree()
            emitted = [*(tree.token_ids[node] for node in result.path[0]), result.next_token[0]]
            self.records.append(StepRecord([tree.rank[node] for node in tree.follow(emitted)]))
        super().on_verified(result)


MAX_NODES = NODE_COUNTS[-1]


class Rated(Settings):
    """A shape of trees with its tau and its expected speed-up."""

    shape: TreeShape
    tau: float
    speedup: float  # expected speed-up over autoregressive decoding, from the measured costs


class PlanChoice(Settings):
    """The trees selected for a machine, each with its tau and its expected speed-up."""

    costs: Costs
    greedy: Rated
    sampling: Rated

    @property
    def plan(self) -> TreePlan:
        return TreePlan(greedy=self.greedy.shape, sampling=self.sampling.shape)


def choose_plan(
    target: TargetAdapter,
    model: JakiroDrafter,
    prompts: Sequence[list[int]],
    *,
    temperature: float = 1.0,
    max_new_tokens: int = 48,
    sampled: bool = True,
    costs: Costs | None = None,
) -> PlanChoice:
    """Return the trees with the highest expected speed on this machine.

    For deterministic trees, the prompts are decoded once with a large tree for each number of trunk
    passes. Smaller trees keep the best-ranked nodes, so the recorded ranks of the accepted nodes
    determine the tau of every smaller tree. Sampled trees cannot be reduced after sampling, so the
    prompts are decoded with every shape of sampled trees.
    """
    costs = costs or measure_costs(target, model, timed_passes(model))
    runs = _Runs(target, model, prompts, max_new_tokens)
    random = runs.sampled_taus(temperature) if sampled else runs.deterministic_taus(temperature)
    return PlanChoice(
        costs=costs,
        greedy=_fastest(runs.deterministic_taus(0.0), costs),
        sampling=_fastest(random, costs),
    )


def expected_tau(steps: Sequence[StepRecord], num_nodes: int) -> float:
    """Return the tau of trees that consist of the `num_nodes` best-ranked candidates."""
    kept = sum(1 + sum(rank < num_nodes for rank in step.ranks) for step in steps)
    return kept / len(steps) if steps else 1.0


class _Runs:
    """Decodes the same prompts with different trees."""

    def __init__(
        self,
        target: TargetAdapter,
        model: JakiroDrafter,
        prompts: Sequence[list[int]],
        max_new_tokens: int,
    ) -> None:
        self.target, self.model = target, model
        self.prompts = prompts
        self.max_new_tokens = max_new_tokens
        self.levels = model.config.settings.schedule.parallel_levels

    def deterministic_taus(self, temperature: float) -> Iterator[tuple[TreeShape, float]]:
        """Yield every shape of deterministic trees up to the largest, with its tau."""
        for passes in range(1, timed_passes(self.model) + 1):
            shape = TreeShape(
                autoregressive_levels=passes,
                parallel_levels=self.levels,
                children=4,
                breadth=3,
                num_nodes=MAX_NODES,
            )
            recorder = RecordingDrafter(TrainedDrafter(self.model, self.target, shape))
            self._decode(recorder, temperature)
            for num_nodes in range(1, shape.max_nodes + 1):
                smaller = shape.model_copy(update={"num_nodes": num_nodes})
                yield smaller, expected_tau(recorder.records, num_nodes)

    def sampled_taus(self, temperature: float) -> Iterator[tuple[TreeShape, float]]:
        for shape in _sampled_shapes(timed_passes(self.model), self.levels):
            drafter = TrainedDrafter(self.model, self.target, shape)
            yield shape, self._decode(drafter, temperature).tau

    def _decode(self, drafter: Drafter, temperature: float) -> DecodeStats:
        stats = []
        for seed, ids in enumerate(self.prompts):
            (request,), _ = prepare_requests(
                self.target.model,
                [ids],
                {"max_new_tokens": self.max_new_tokens},
                temperature=temperature,
                seed=seed,
                max_position=self.target.spec.max_position,
            )
            run = DecodeRun(self.target, drafter, request)
            stats.append(run.finish().stats)
        return DecodeStats.pooled(stats)


def _sampled_shapes(max_passes: int, levels: int) -> list[TreeShape]:
    """Return promising shapes of sampled trees: those with few passes, children and nodes.

    If all of them are large, because there are many parallel levels, return the smallest.
    """
    shapes = [
        TreeShape(
            autoregressive_levels=passes,
            parallel_levels=levels,
            children=children,
            breadth=breadth,
            sampled=True,
        )
        for passes in range(1, max_passes + 1)
        for children, breadth in ((2, 1), (3, 1), (4, 1), (2, 2), (3, 2))
    ]
    small = [shape for shape in shapes if shape.max_nodes <= MAX_NODES // 2]
    return small or [min(shapes, key=lambda shape: shape.max_nodes)]


def _fastest(taus: Iterable[tuple[TreeShape, float]], costs: Costs) -> Rated:
    autoregressive = costs.ceiling(None, 1.0)
    rated = (
        Rated(shape=shape, tau=tau, speedup=costs.ceiling(shape, tau) / autoregressive)
        for shape, tau in taus
    )
    return max(rated, key=lambda tree: tree.speedup)


def trees_of_size(
    drafter: JakiroDrafter, num_nodes: int, num_passes: int | None = None
) -> TreePlan:
    """Return trees of at most `num_nodes` candidates, if possible as deep as in training.

    A greedy tree consists of the nodes with the highest scores in a larger tree, as in EAGLE-2
    (arXiv 2406.16858). For 8 nodes, each level of the larger tree has 3 expanded nodes with 4
    children each; for 60 nodes, each level has 10 expanded nodes with 10 children each. A sampled
    tree, from which no candidate may be removed, has the widest levels that fit.
    """
    levels = drafter.levels
    if num_passes is not None:
        levels["autoregressive_levels"] = num_passes
    width = isqrt(num_nodes * 5 // 3)
    sizes = {"children": max(4, width), "breadth": max(3, width), "num_nodes": num_nodes}
    wide = validate_settings(TreeShape, levels | sizes, source="the trees")
    sampled = wide.model_copy(update={"sampled": True})
    shapes = [shape.within(Budget(num_nodes, num_nodes)) for shape in (wide, sampled)]
    greedy, sampling = (shape for shape in shapes if shape is not None)
    return TreePlan(greedy=greedy, sampling=sampling)


def largest_trees(drafter: JakiroDrafter) -> TreePlan:
    """Return the largest trees that `tree="auto"` may select."""
    levels = {
        "autoregressive_levels": timed_passes(drafter),
        "parallel_levels": drafter.config.settings.schedule.parallel_levels,
    }
    return TreePlan(
        greedy=TreeShape(**levels, children=4, breadth=2, num_nodes=MAX_NODES),
        sampling=TreeShape(**levels, children=3, breadth=2, num_nodes=MAX_NODES, sampled=True),
    )
