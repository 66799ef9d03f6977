"""Each request has its own random numbers, independent of those that a drafter learned from."""

import gc
from collections import Counter
from collections.abc import Callable
from functools import partial
from threading import Thread

import pytest
import torch
from helpers.chi_square import p_value, probs_of_continuations
from helpers.losslessness import LEAST_P_VALUE
from helpers.models import tiny_drafter, tiny_llama

from inference import SpeculativeDecoder
from inference.autotune.costs import Costs
from inference.autotune.policy import AutoTree
from inference.autotune.setup import Pair
from inference.drafters.aded.drafter import AdedDrafter, AdedSettings
from inference.drafters.combined.drafter import CombinedDrafter
from inference.protocol import RequestCounter, RequestTicket, number_of
from inference.trees.shape import TreePlan, TreeShape
from jakiro.target.adapter import TargetAdapter

PROMPT = [1, 2, 1, 2, 1]
SAMPLING = {"temperature": 1.5, "top_k": 3, "max_new_tokens": 2}


def _teach(decoder: SpeculativeDecoder, seed: int) -> None:
    decoder.generate(PROMPT, seed=seed, **SAMPLING)


def _teach_across_a_reset(decoder: SpeculativeDecoder, seed: int) -> None:
    active = iter(decoder.start([PROMPT], seed=seed, **SAMPLING))
    next(active)
    decoder.reset()
    list(active)


@pytest.mark.parametrize(
    "teach",
    # Quick test of the slow case: test_a_ticket_ends_with_its_run_or_with_the_last_reference.
    [_teach, pytest.param(_teach_across_a_reset, marks=pytest.mark.slow)],
)
def test_a_second_request_with_the_same_seed_has_the_target_distribution(
    teach: Callable[[SpeculativeDecoder, int], None],
) -> None:
    model = tiny_llama(vocab=23, num_hidden_layers=1)
    decoder = SpeculativeDecoder(model, AdedDrafter(AdedSettings(num_nodes=6)), tree="fixed")
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(100):
        decoder.reset()
        teach(decoder, seed)
        second = decoder.generate(PROMPT, seed=seed, **SAMPLING)
        counts[tuple(second.new_token_ids)] += 1
    probs = probs_of_continuations(model, PROMPT, 2, temperature=1.5, top_k=3)
    assert p_value(counts, probs) > LEAST_P_VALUE


def _two_of_each(decoder: SpeculativeDecoder) -> list[list[int]]:
    arguments = {"temperature": 1.5, "seed": 7, "max_new_tokens": 8}
    return [decoder.generate(PROMPT, **arguments).new_token_ids for _ in range(2)]


def test_requests_in_the_same_order_repeat_themselves_after_a_reset() -> None:
    decoder = SpeculativeDecoder(tiny_llama(vocab=23), AdedDrafter(), tree="fixed")
    first, second = _two_of_each(decoder)
    assert first != second
    decoder.reset()
    assert _two_of_each(decoder) == [first, second]


def test_decoders_that_share_a_drafter_share_the_count() -> None:
    model = tiny_llama(vocab=23)
    aded = AdedDrafter()
    outputs = [_two_of_each(SpeculativeDecoder(model, aded, tree="fixed"))[0] for _ in range(2)]
    assert outputs[0] != outputs[1]


def test_trees_selected_by_experience_count_requests_too() -> None:
    model = tiny_llama(vocab=23)
    decoder = SpeculativeDecoder(model, tiny_drafter(TargetAdapter(model)), tree="fixed")
    costs = Costs(verify={0: 1.0, 24: 1.5}, draft={1: 0.1, 2: 0.2, 3: 0.3})
    decoder.policy = AutoTree(TreePlan.of(TreeShape()), costs)
    first, second = _two_of_each(decoder)
    assert first == second  # with a seed, trees are not selected by experience
    decoder.generate([1, 2, 3], max_new_tokens=8, temperature=1.0)
    assert decoder.policy.request_counter.take().number > 0
    decoder.reset()
    assert decoder.policy.request_counter.take().number == 0


def test_random_numbers_that_taught_the_trees_do_not_come_again() -> None:
    model = tiny_llama(vocab=23)
    decoder = SpeculativeDecoder(model, AdedDrafter())
    assert isinstance(decoder.policy, AutoTree)
    seen = []
    for _ in range(3):
        torch.manual_seed(0)
        run = decoder.start([[1, 2, 3]], temperature=1.0, max_new_tokens=4)
        seen.append(run.sequences[0].request.sampling.request_index)
        run.finish()
        decoder.reset(trees=False)  # forgets the texts, but not the trees
    assert len(set(seen)) == 3
    decoder.reset()
    run = decoder.start([[1, 2, 3]], temperature=1.0, max_new_tokens=4)
    assert run.sequences[0].request.sampling.request_index == seen[0]


def test_two_tickets_have_a_number_of_their_own() -> None:
    first, second = RequestCounter(), RequestCounter()
    firsts, seconds = ([counter.take() for _ in range(8)] for counter in (first, second))
    numbers = {number_of((each, other)) for each in firsts for other in seconds}
    assert len(numbers) == 64
    assert number_of((firsts[3],)) == 3


def test_a_ticket_ends_with_its_run_or_with_the_last_reference() -> None:
    decoder = SpeculativeDecoder(tiny_llama(vocab=23), AdedDrafter(), tree="fixed")
    counter = decoder.drafter.request_counter
    decoder.generate(PROMPT, seed=7, **SAMPLING)
    dropped = decoder.start([PROMPT], seed=7, **SAMPLING)
    kept = decoder.start([PROMPT], seed=7, **SAMPLING)
    del dropped
    decoder.reset()
    assert counter.take().number == 3
    kept.finish()
    decoder.reset()
    assert counter.take().number == 0


class _Abandoned:
    """A run in a reference cycle, which ends its ticket when it is garbage-collected."""

    def __init__(self, ticket: RequestTicket) -> None:
        self.ticket, self.itself = ticket, self

    def __del__(self) -> None:
        self.ticket.end()


def test_a_ticket_may_end_while_its_thread_takes_another() -> None:
    counter = RequestCounter()

    def take_many() -> None:
        for _ in range(300):
            _Abandoned(counter.take())

    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        thread = Thread(target=take_many, daemon=True)
        thread.start()
        thread.join(timeout=30)
    finally:
        gc.set_threshold(*thresholds)
    assert not thread.is_alive()


def test_a_reset_of_a_shared_drafter_resets_combined_drafters_too() -> None:
    model = tiny_llama(vocab=23)
    aded = AdedDrafter()
    trained = tiny_drafter(TargetAdapter(model))
    both = SpeculativeDecoder(
        model, Pair(trained, partial(CombinedDrafter, second=aded)), tree="fixed"
    )
    alone = SpeculativeDecoder(model, aded, tree="fixed")
    arguments = {"temperature": 1.5, "seed": 7, "max_new_tokens": 12}
    first = both.generate(PROMPT, **arguments)
    alone.reset()
    again = both.generate(PROMPT, **arguments)
    assert again.new_token_ids == first.new_token_ids
    assert again.depths == first.depths
