"""`tree="auto"`: drafts as much as pays, stops where it does not, and never changes a token."""

from pathlib import Path

import pytest
import torch
from helpers.models import tiny_drafter, tiny_llama
from helpers.tables import no_processors

from inference import SpeculativeDecoder
from inference.auto_tree import SHORTEST_PAUSE, AutoRun, AutoTree
from inference.costs import Costs, known_costs
from inference.draft_tree import TreeRow
from inference.protocol import Budget
from inference.sampling import Sampling
from inference.tree_shape import TreePlan, TreeShape
from jakiro.target import TargetAdapter

COSTS = Costs(
    verify={0: 1.0, 4: 1.2, 8: 1.5, 24: 3.0},
    draft={1: 0.2, 2: 0.4, 3: 0.6},
)
LEVELS = {"autoregressive_levels": 3, "parallel_levels": 1}
PLAN = TreePlan(
    greedy=TreeShape(**LEVELS, children=4, breadth=2, num_nodes=24),
    sampling=TreeShape(**LEVELS, children=3, breadth=2, num_nodes=24, sampled=True),
)
GREEDY, RANDOM = no_processors(do_sample=False), no_processors()
NO_ROW = TreeRow([], [], [], [], [], {}, {}, {})


class World:
    """Rounds of a machine with known costs, and drafts accepted as a law says."""

    def __init__(self, sampling: Sampling, depth_accepted: int) -> None:
        self.run: AutoRun = AutoTree(PLAN, COSTS).open(sampling, 1)
        self.shape = PLAN.shape(sampling)
        self.depth_accepted = depth_accepted
        self.seconds = 0.0
        self.tokens = 0
        self.num_plain = 0

    def round(self) -> Budget | None:
        """Play one round."""
        budget = self.run.next_budget()
        shape = None if budget is None else self.shape.within(budget)
        if shape is None:
            seconds, row, path = COSTS.verify_seconds(0), NO_ROW, []
            self.num_plain += 1
        else:
            draft = COSTS.draft[shape.autoregressive_levels]
            seconds = COSTS.verify_seconds(shape.max_nodes) + draft
            count, depth = shape.max_nodes, min(self.depth_accepted, shape.depth)
            # The accepted path is the chain of first candidates, the best-ranked ones.
            firsts = [0, *(sum(shape.level_sizes[:level]) for level in range(1, shape.depth))]
            path = (firsts if shape.sampled else list(range(count)))[: min(depth, count)]
            depths = [1] * count
            for level, node in enumerate(path, start=1):
                depths[node] = level
            row = TreeRow([0] * count, [-1] * count, depths, list(range(count)), [], {}, {}, {})
        self.run.learn([row], [path], seconds)
        self.seconds += seconds
        self.tokens += 1 + len(path)
        return budget


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_a_useless_drafter_is_left_alone_after_a_few_rounds(sampling: Sampling) -> None:
    world = World(sampling, depth_accepted=0)
    while world.tokens < 512:
        world.round()
    slow_down = world.seconds / (world.tokens * COSTS.verify_seconds(0))
    assert slow_down < 1.05
    assert world.num_plain > 480


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_a_good_drafter_gets_the_tree_that_pays_most(sampling: Sampling) -> None:
    world = World(sampling, depth_accepted=3)
    for _ in range(400):
        world.round()
    budgets = [budget for budget in (world.round() for _ in range(10)) if budget is not None]
    assert len(budgets) >= 9  # the odd plain step tells what it takes
    shape = world.shape.within(budgets[0])
    assert shape is not None
    # Three candidates in a row are all that is ever accepted: more nodes would only cost.
    assert shape.depth == 3
    assert shape.max_nodes <= 4
    assert world.num_plain < 20


def test_drafting_is_tried_again_after_a_pause_and_resumed_when_it_pays() -> None:
    world = World(GREEDY, depth_accepted=0)
    while world.round() is not None:
        pass
    world.depth_accepted = 3
    for _ in range(10 * SHORTEST_PAUSE):
        world.round()
    before = world.num_plain
    for _ in range(50):
        world.round()
    assert world.num_plain <= before + 2


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_automatic_trees_change_no_token(temperature: float, tmp_path: Path) -> None:
    model = tiny_llama(vocab=11)
    target = TargetAdapter(model)
    drafter = tiny_drafter(target)
    automatic = SpeculativeDecoder(model, drafter)
    automatic.policy = AutoTree(PLAN, known_costs(target, drafter, tmp_path))
    prompts = [[1, 2, 3 + n] for n in range(4)]
    for seed, prompt in enumerate(prompts):
        output = automatic.generate(prompt, max_new_tokens=40, temperature=temperature, seed=seed)
        assert len(output.new_token_ids) == 40
        if temperature == 0:
            expected = SpeculativeDecoder(model).generate(prompt, max_new_tokens=40)
            assert output.new_token_ids == expected.new_token_ids
    assert [path.name[:6] for path in tmp_path.iterdir()] == ["costs-"]


def test_costs_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = TargetAdapter(tiny_llama(vocab=11))
    drafter = tiny_drafter(target)
    first = known_costs(target, drafter, tmp_path)
    monkeypatch.setattr("inference.costs.measure_costs", None)
    assert known_costs(target, drafter, tmp_path) == first


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 5, 8, 13, 30])
@pytest.mark.parametrize("depth", [1, 2, 3, 4, None])
@pytest.mark.parametrize("shape", PLAN.shapes, ids=["greedy", "random"])
def test_every_budget_is_kept(shape: TreeShape, depth: int | None, num_nodes: int) -> None:
    cut = shape.within(Budget(num_nodes, depth))
    if cut is None:
        assert shape.sampled
        assert num_nodes < (depth or shape.depth)  # not even a chain fits
    else:
        assert cut.max_nodes <= num_nodes
        assert cut.depth == (depth or shape.depth)


def test_the_sum_of_levels_is_the_size_of_the_tree() -> None:
    assert torch.tensor(PLAN.sampling.level_sizes).sum() == PLAN.sampling.max_nodes
