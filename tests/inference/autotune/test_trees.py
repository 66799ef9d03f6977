"""`tree="auto"` drafts only while this saves time, and never changes a token."""

import pytest
from helpers.losslessness import assert_follows_distribution, greedy_by_transformers
from helpers.models import tiny_drafter, tiny_llama
from helpers.tables import no_processors
from transformers import LlamaForCausalLM

from inference import SpeculativeDecoder
from inference.autotune.costs import Costs
from inference.autotune.policy import AutoRun, AutoTree
from inference.autotune.trees import EXPLORE_EVERY
from inference.draft_tree import SequenceTree
from inference.drafters.combined.drafter import CombinedDrafter
from inference.drafters.combined.knowledge import CombinedSettings
from inference.drafters.lookup import LookupDrafter
from inference.drafters.small_lm import SmallLMDrafter
from inference.engine.policy import RunProgress
from inference.protocol import Budget
from inference.sampling.options import Sampling
from inference.trees.shape import TreePlan, TreeShape
from jakiro.target.adapter import TargetAdapter

COSTS = Costs(
    verify={0: 1.0, 4: 1.2, 8: 1.5, 24: 3.0},
    draft={1: 0.2, 2: 0.4, 3: 0.6},
)
LEVELS = {"autoregressive_levels": 3, "parallel_levels": 1}
PLAN = TreePlan(
    greedy=TreeShape(**LEVELS, children=4, breadth=2, num_nodes=24),
    sampling=TreeShape(**LEVELS, children=3, breadth=2, num_nodes=24, sampled=True),
)
GREEDY, SAMPLING = no_processors(do_sample=False), no_processors()
NO_TREE = SequenceTree([], [], [], [], [], {}, {}, {})


class World:
    """Simulated decoding on a machine with known costs and known acceptance."""

    def __init__(self, sampling: Sampling, depth_accepted: int) -> None:
        self.run: AutoRun = AutoTree(PLAN, COSTS).new_run(sampling, 1)
        self.shape = PLAN.shape(sampling)
        self.depth_accepted = depth_accepted
        self.seconds = 0.0
        self.tokens = 0
        self.num_undrafted = 0

    def step(self) -> Budget | None:
        """Simulate a decoding step and return its budget."""
        budget = self.run.next_budget(RunProgress())
        shape = None if budget is None else self.shape.within(budget)
        if shape is None:
            seconds, tree, path = COSTS.verify_seconds(0), NO_TREE, []
            self.num_undrafted += 1
        else:
            draft = COSTS.draft[shape.autoregressive_levels]
            seconds = COSTS.verify_seconds(shape.max_nodes) + draft
            count, depth = shape.max_nodes, min(self.depth_accepted, shape.depth)
            # The accepted path is the chain of first candidates, which are ranked best.
            firsts = [0, *(sum(shape.level_sizes[:level]) for level in range(1, shape.depth))]
            path = (firsts if shape.sampled else list(range(count)))[: min(depth, count)]
            depths = [1] * count
            for level, node in enumerate(path, start=1):
                depths[node] = level
            tree = SequenceTree(
                [0] * count, [-1] * count, depths, list(range(count)), [], {}, {}, {}
            )
        self.run.learn([tree], [path], seconds, budget)
        self.seconds += seconds
        self.tokens += 1 + len(path)
        return budget


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLING], ids=["greedy", "sampling"])
def test_a_useless_drafter_is_given_up_after_a_few_steps(sampling: Sampling) -> None:
    world = World(sampling, depth_accepted=0)
    while world.tokens < 512:
        world.step()
    slow_down = world.seconds / (world.tokens * COSTS.verify_seconds(0))
    assert slow_down < 1.05
    assert world.num_undrafted > 470


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLING], ids=["greedy", "sampling"])
def test_a_good_drafter_gets_the_tree_that_pays_most(sampling: Sampling) -> None:
    world = World(sampling, depth_accepted=3)
    for _ in range(400):
        world.step()
    budgets = [budget for budget in (world.step() for _ in range(10)) if budget is not None]
    assert len(budgets) >= 9  # a step without drafts is timed now and then
    shape = world.shape.within(budgets[0])
    assert shape is not None
    # At most three candidates in a chain are accepted, so more nodes would only cost time.
    assert shape.depth == 3
    assert shape.max_nodes <= 4
    assert world.num_undrafted < 20


def test_drafting_is_tried_now_and_then_and_resumed_when_it_pays() -> None:
    world = World(GREEDY, depth_accepted=0)
    for _ in range(100):
        world.step()
    world.depth_accepted = 3
    for _ in range(20 * EXPLORE_EVERY):
        world.step()
    before = world.num_undrafted
    for _ in range(50):
        world.step()
    assert world.num_undrafted <= before + 2


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_automatic_trees_change_no_token(temperature: float) -> None:
    model = tiny_llama(vocab=11)
    automatic = SpeculativeDecoder(model, tiny_drafter(TargetAdapter(model)))
    assert isinstance(automatic.policy, AutoTree)
    prompts = [[1, 2, 3 + n] for n in range(4)]
    for seed, prompt in enumerate(prompts):
        output = automatic.generate(prompt, max_new_tokens=40, temperature=temperature, seed=seed)
        assert len(output.new_token_ids) == 40
        if temperature == 0:
            expected = SpeculativeDecoder(model).generate(prompt, max_new_tokens=40)
            assert output.new_token_ids == expected.new_token_ids


def test_a_given_seed_gives_the_same_sample_however_long_steps_take() -> None:
    model = tiny_llama(vocab=11)
    automatic = SpeculativeDecoder(model, tiny_drafter(TargetAdapter(model)))
    automatic.policy = AutoTree(PLAN, COSTS)
    several = [
        automatic.generate([1, 2, 3], max_new_tokens=30, temperature=0.9, seed=5).new_token_ids
        for _ in range(2)
    ]
    assert several[0] == several[1]
    assert automatic.policy.request_counter.take().number == 0  # nothing was learned
    fixed = automatic.policy.reproducible().new_run(SAMPLING, 1)
    assert fixed.next_budget(RunProgress()) == fixed.next_budget(RunProgress()) is not None


def test_a_tree_that_does_not_pay_at_assumed_rates_is_not_drafted_with_a_seed() -> None:
    dear = Costs(verify={0: 1.0, 24: 30.0}, draft={1: 3.0, 2: 4.0, 3: 5.0})
    assert (
        AutoTree(PLAN, dear).reproducible().new_run(SAMPLING, 1).next_budget(RunProgress()) is None
    )


@pytest.mark.parametrize("num_nodes", [1, 5, 30])
@pytest.mark.parametrize("depth", [1, 3, None])
@pytest.mark.parametrize("shape", PLAN.shapes, ids=["greedy", "sampling"])
def test_every_budget_is_kept(shape: TreeShape, depth: int | None, num_nodes: int) -> None:
    cut = shape.within(Budget(num_nodes, depth))
    if cut is None:
        assert shape.sampled
        assert num_nodes < (depth or shape.depth)  # not even a chain fits
    else:
        assert cut.max_nodes <= num_nodes
        assert cut.depth == (depth or shape.depth)


def _with_small_model(vocab: int, *, is_pair: bool) -> tuple[LlamaForCausalLM, SpeculativeDecoder]:
    """Return a target, and a decoder with automatic trees for which drafting pays."""
    model = tiny_llama(vocab=vocab, initializer_range=0.15)
    small = SmallLMDrafter(tiny_llama(vocab=vocab, initializer_range=0.15), model)
    costs = Costs(verify={0: 1.0, 24: 1.2}, draft={1: 0.02, 2: 0.04, 3: 0.06})
    if not is_pair:
        decoder = SpeculativeDecoder(model, small, tree="fixed")
        decoder.policy = AutoTree(small.plan, costs)
        return model, decoder
    pair = CombinedDrafter(small, LookupDrafter(), CombinedSettings(num_nodes=5))
    decoder = SpeculativeDecoder(model, pair, tree="fixed")
    policy = AutoTree(Budget(pair.max_nodes, pair.max_depth), costs)
    policy.on_reset = pair.use_costs(costs.verify_seconds, costs.draft)
    decoder.policy = policy
    return model, decoder


@pytest.mark.parametrize("is_pair", [False, True], ids=["small model", "pair"])
def test_automatic_trees_of_a_small_model_change_no_greedy_token(is_pair: bool) -> None:
    model, decoder = _with_small_model(11, is_pair=is_pair)
    for first in range(4):
        prompt = [first, 2, 3, 2, 3]
        output = decoder.generate(prompt, max_new_tokens=30, temperature=0)
        assert output.sequences[0].tolist() == greedy_by_transformers(model, prompt, 30)


def _with_trained_drafter(vocab: int) -> tuple[LlamaForCausalLM, SpeculativeDecoder]:
    model = tiny_llama(vocab=vocab, initializer_range=0.15)
    drafter = tiny_drafter(TargetAdapter(model))
    decoder = SpeculativeDecoder(model, drafter, tree=PLAN)
    costs = Costs(verify={0: 1.0, 24: 1.01}, draft={1: 0.001, 2: 0.001, 3: 0.001})
    decoder.policy = AutoTree(PLAN, costs)
    return model, decoder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["small model", "pair", "trained"])
def test_samples_with_trees_that_are_learned_follow_the_targets_distribution(
    name: str,
) -> None:
    if name == "trained":
        model, decoder = _with_trained_drafter(23)
    else:
        model, decoder = _with_small_model(23, is_pair=name == "pair")
    stats = assert_follows_distribution(decoder, model, 0.8, batch=50, is_seeded=False)
    assert stats.accepted.total() > 50


def test_drafting_begins_only_where_it_may_repay_the_reading_of_the_context() -> None:
    costs = COSTS.model_copy(update={"read": 0.01})
    run = AutoTree(PLAN, costs).new_run(GREEDY, 1)
    # Reading takes 10 seconds.
    assert run.next_budget(RunProgress(1000, 10)) is None
    assert run.next_budget(RunProgress(1000, 100)) is not None
    assert run.next_budget(RunProgress(0, 1)) is not None  # everything has been read


def test_drafts_that_are_shorter_than_requested_cost_what_they_have() -> None:
    """A drafter that proposes few tokens is not held to be as slow as full trees."""
    dear = Costs(verify={0: 1.0, 8: 1.1, 24: 9.0}, draft={})
    run = AutoTree(Budget(24), dear).new_run(GREEDY, 1)
    short = SequenceTree([0] * 2, [-1, 0], [1, 2], [0, 1], [], {}, {}, {})
    for _ in range(200):
        budget = run.next_budget(RunProgress())
        run.learn([short if budget else NO_TREE], [[0, 1] if budget else []], 1.0, budget)
    assert (run.next_budget(RunProgress()) or Budget(0)).num_nodes > 1


@pytest.mark.parametrize("accepted", [0, 1])
def test_siblings_are_drafted_only_if_they_are_accepted(accepted: int) -> None:
    """The candidate with this index among its siblings is accepted in every step, no other one."""
    shape = TreeShape(
        autoregressive_levels=1, parallel_levels=0, children=2, breadth=1, sampled=True
    )
    costs = Costs(verify={0: 1.0, 1: 1.1, 2: 1.12}, draft={1: 0.1})
    run = AutoTree(TreePlan.of(shape), costs).new_run(SAMPLING, 1)
    widths = []
    for _ in range(200):
        budget = run.next_budget(RunProgress())
        count = 0 if budget is None else budget.num_nodes
        nodes = range(count)
        tree = SequenceTree(list(nodes), [-1] * count, [1] * count, list(nodes), [], {}, {}, {})
        run.learn([tree], [[accepted]] if accepted < count else [[]], 1.0, budget)
        widths.append(count)
    assert widths[-30:].count(accepted + 1) >= 28
