"""Chooses draft trees by expected speed: what they win on prompts against what they cost here."""

from collections.abc import Iterable, Iterator, Sequence

from inference.costs import NODE_COUNTS, Costs, measure_costs, timed_passes
from inference.drafters.trained import TrainedDrafter
from inference.engine import DecodeRun
from inference.preparation import prepare_requests
from inference.protocol import Drafter
from inference.recording import RecordingDrafter, RoundRecord
from inference.stats import DecodeStats
from inference.tree_shape import TreePlan, TreeShape
from jakiro.drafter import JakiroDrafter
from jakiro.settings import Settings
from jakiro.target import TargetAdapter

MAX_NODES = NODE_COUNTS[-1]


class Rated(Settings):
    """A tree and what is expected of it."""

    shape: TreeShape
    tau: float
    speedup: float  # over plain decoding, by the cost model


class PlanChoice(Settings):
    """The trees chosen for a machine, with the figures that speak for them."""

    costs: Costs
    greedy: Rated
    sampling: Rated

    @property
    def plan(self) -> TreePlan:
        """The trees alone."""
        return TreePlan(greedy=self.greedy.shape, sampling=self.sampling.shape)


def choose_plan(
    target: TargetAdapter,
    model: JakiroDrafter,
    prompts: Sequence[list[int]],
    *,
    temperature: float = 1.0,
    max_new_tokens: int = 48,
    drawn: bool = True,
    costs: Costs | None = None,
) -> PlanChoice:
    """Return the trees of highest expected speed on this machine.

    Chosen candidates: for each number of trunk passes a generous tree is decoded once; because
    smaller trees keep the best-ranked nodes, its record tells what every smaller tree would have
    won. Drawn ones: such a tree cannot be cut afterwards, so each candidate shape is decoded.

    Args:
        target: the frozen target.
        model: the drafter.
        prompts: token ids to decode; not those that results are reported on.
        temperature: of random decoding.
        max_new_tokens: decoded for each prompt and tree.
        drawn: whether random decoding draws its candidates.
        costs: of this machine; None to measure them.
    """
    costs = costs or measure_costs(target, model, timed_passes(model))
    runs = _Runs(target, model, prompts, max_new_tokens)
    random = runs.drawn_taus(temperature) if drawn else runs.chosen_taus(temperature)
    return PlanChoice(
        costs=costs,
        greedy=_fastest(runs.chosen_taus(0.0), costs),
        sampling=_fastest(random, costs),
    )


def expected_tau(rounds: Sequence[RoundRecord], num_nodes: int) -> float:
    """Return the tau that trees of the `num_nodes` best-ranked candidates would have had."""
    kept = sum(1 + sum(rank < num_nodes for rank in one.ranks) for one in rounds)
    return kept / len(rounds) if rounds else 1.0


class _Runs:
    """Decodes the same prompts with one tree after the other."""

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

    def chosen_taus(self, temperature: float) -> Iterator[tuple[TreeShape, float]]:
        """Yield every tree of chosen candidates up to the largest ones, and its tau."""
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

    def drawn_taus(self, temperature: float) -> Iterator[tuple[TreeShape, float]]:
        """Yield every tree of drawn candidates that is worth trying, and its tau."""
        for shape in _sampled_shapes(timed_passes(self.model), self.levels):
            drafter = TrainedDrafter(self.model, self.target, shape)
            yield shape, self._decode(drafter, temperature).tau

    def _decode(self, drafter: Drafter, temperature: float) -> DecodeStats:
        stats = []
        for seed, ids in enumerate(self.prompts):
            (request,), _ = prepare_requests(
                self.target.model,
                [ids],
                seed=seed,
                max_position=self.target.spec.max_position,
                temperature=temperature,
                max_new_tokens=self.max_new_tokens,
            )
            run = DecodeRun(self.target, drafter, request)
            stats.append(run.finish().stats)
        return DecodeStats.pooled(stats)


def _sampled_shapes(max_passes: int, levels: int) -> list[TreeShape]:
    """Return the drawn trees worth trying: few passes, few children, not too many nodes."""
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
    return [shape for shape in shapes if shape.max_nodes <= MAX_NODES // 2]


def _fastest(taus: Iterable[tuple[TreeShape, float]], costs: Costs) -> Rated:
    plain = costs.ceiling(None, 1.0)
    rated = (
        Rated(shape=shape, tau=tau, speedup=costs.ceiling(shape, tau) / plain)
        for shape, tau in taus
    )
    return max(rated, key=lambda one: one.speedup)
