"""Requests that take and leave the places of a lane get the tokens that they get alone."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from helpers.lanes import Work, finish, lane_of, played, read_chunk, request_of, requests_of, start
from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from helpers.quick import mostly_slow
from helpers.variants import FEEDBACK, HYBRID, VARIANTS
from torch import Tensor
from transformers import LlamaForCausalLM, LogitsProcessor, LogitsProcessorList

from inference import SpeculativeDecoder
from inference.drafters.aded.drafter import AdedDrafter
from inference.drafters.combined.drafter import CombinedDrafter
from inference.drafters.lookup import LookupDrafter, LookupSettings
from inference.drafters.repeating import RepeatingDrafter, RepeatSettings
from inference.drafters.small_lm import SmallLMDrafter
from inference.engine.context import Context
from inference.engine.request import SequenceState
from inference.trees.shape import TreeShape
from jakiro.errors import NumericalError
from jakiro.target.adapter import TargetAdapter
from jakiro.target.sequence_storage import SequenceStorage

CHOSEN = TreeShape(children=4, breadth=3, num_nodes=12)
SAMPLED = TreeShape(children=3, breadth=2, sampled=True)
TAIL = {"combine": "sum", "parallel_levels": 0, "tail_layers": 1}
TRAINED = {
    "moa": tiny_settings(),
    "feedback": tiny_settings(trunk=FEEDBACK),
    "hybrid": tiny_settings(parallel_levels=2, trunk=HYBRID),
    "tail": tiny_settings(**TAIL),
    "gumiho": VARIANTS["gumiho"],
}
PROMPTS = [
    [1, 2, 3],
    [4, 5, 6, 7, 8, 9, 10],
    [3],
    [9, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1],
    [2, 1, 2, 1, 2],
    [7, 7],
    [5, 6, 5, 6, 5, 6],
    [10, 4],
]
LENGTHS = [12, 5, 9, 20, 7, 1, 16, 11]
GREEDY: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0, "repetition_penalty": 1.4}]
DRAWS: list[dict[str, Any]] = [
    {"temperature": 0.8},
    {"temperature": 1.2, "top_p": 0.8},
    {"temperature": 0.6, "repetition_penalty": 1.3},
]
OPTIONS = {"greedy": GREEDY, "sampled": DRAWS}
CANCELLED = {3: 6, 6: 4}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(vocab=11)


def _trained(model: LlamaForCausalLM, name: str, options: str) -> SpeculativeDecoder:
    shape = CHOSEN if options == "greedy" else SAMPLED
    levels = TRAINED[name].schedule.parallel_levels
    tree = shape.model_copy(update={"parallel_levels": levels})
    return SpeculativeDecoder(model, tiny_drafter(TargetAdapter(model), TRAINED[name]), tree=tree)


def _lookup(_: LlamaForCausalLM) -> LookupDrafter:
    return LookupDrafter(LookupSettings(num_nodes=12, depth=5))


def _small(model: LlamaForCausalLM) -> SmallLMDrafter:
    return SmallLMDrafter(tiny_llama(vocab=11, seed=7), model)


OTHERS: dict[str, Callable[[LlamaForCausalLM], Any]] = {
    "none": lambda _: None,
    "lookup": _lookup,
    "small": _small,
    "repeating": lambda model: RepeatingDrafter(_lookup(model), RepeatSettings()),
}


def _decoder(model: LlamaForCausalLM, name: str, options: str) -> SpeculativeDecoder:
    if name in TRAINED:
        return _trained(model, name, options)
    return SpeculativeDecoder(model, OTHERS[name](model), tree="fixed")


def _works(options: str) -> list[Work]:
    kinds = OPTIONS[options]
    return [
        Work(prompt, 5 + index, {**kinds[index % len(kinds)], "max_new_tokens": length})
        for index, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True))
    ]


def _assert_equal_alone(
    decoder: SpeculativeDecoder, works: list[Work], states: list[SequenceState]
) -> None:
    for index, (work, state) in enumerate(zip(works, states, strict=True)):
        alone = work.alone(decoder)
        if index in CANCELLED:
            assert CANCELLED[index] <= len(state.new_token_ids) < len(alone.new_token_ids)
            assert state.new_token_ids == alone.new_token_ids[: len(state.new_token_ids)]
        else:
            assert state.new_token_ids == alone.new_token_ids
            assert state.stats.accepted == alone.stats.accepted


QUICK = [("none", "sampled"), ("small", "greedy"), ("hybrid", "sampled"), ("gumiho", "greedy")]


@pytest.mark.parametrize(
    "pair", mostly_slow(product([*OTHERS, *TRAINED], OPTIONS), quick=QUICK), ids=" ".join
)
def test_requests_that_join_leave_and_are_cancelled_get_the_tokens_that_they_get_alone(
    model: LlamaForCausalLM, pair: tuple[str, str]
) -> None:
    name, options = pair
    decoder, works = _decoder(model, name, options), _works(options)
    _assert_equal_alone(decoder, works, played(decoder, works, CANCELLED, seed=1))


@pytest.mark.parametrize("name", ["aded", "combined"])
def test_with_a_drafter_that_learns_greedy_tokens_are_those_of_the_request_alone(
    model: LlamaForCausalLM, name: str
) -> None:
    drafter = AdedDrafter() if name == "aded" else CombinedDrafter(_small(model), _lookup(model))
    decoder, works = SpeculativeDecoder(model, drafter, tree="fixed"), _works("greedy")
    states = played(decoder, works, {}, seed=0)
    for work, state in zip(works, states, strict=True):
        assert state.new_token_ids == work.alone(decoder).new_token_ids


@pytest.mark.parametrize(
    "name", mostly_slow(["moa", "hybrid", "small", "lookup"], quick=["hybrid", "lookup"])
)
def test_prompts_that_are_read_in_chunks_while_others_go_on_make_no_difference(
    model: LlamaForCausalLM, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = _decoder(model, name, "sampled")
    long = Work([1 + index % 7 for index in range(30)], 3, {**DRAWS[0], "max_new_tokens": 12})
    other = Work([1, 2, 3], 4, {**DRAWS[1], "max_new_tokens": 40})
    alone = [work.alone(decoder).new_token_ids for work in (long, other)]
    monkeypatch.setattr("inference.engine.context.PREFILL_CHUNK", 8)
    states = [
        SequenceState.of(index, request_of(decoder, work))
        for index, work in enumerate((long, other))
    ]
    lane = lane_of(decoder, states[0].request)
    start(lane, states[1])
    prefill = lane.prefill_of(states[:1])
    while not prefill.is_complete:
        lane.step()
        read_chunk(prefill)
        session = prefill.context.session
        assert session is not None
        assert session.lengths[0] >= prefill.context.lengths[0] - 8  # follows chunk by chunk
    lane.start(prefill, states[:1])
    finish(lane)
    assert states[0].new_token_ids == alone[0]
    assert states[1].new_token_ids == alone[1]


@pytest.mark.parametrize(
    ("name", "options"), [("none", "greedy"), ("hybrid", "sampled"), ("small", "sampled")]
)
def test_choices_share_a_prefill_and_equal_requests_with_their_row(
    model: LlamaForCausalLM, name: str, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = _decoder(model, name, options)
    work = Work([4, 5, 6, 7, 5, 6], 3, {**OPTIONS[options][0], "max_new_tokens": 14})
    requests = requests_of(decoder, work, 4)
    states = [SequenceState.of(index, request) for index, request in enumerate(requests)]
    lane = lane_of(decoder, requests[0], places=5)
    first = SequenceState.of(0, request_of(decoder, _works(options)[0]))
    start(lane, first)
    lane.step()
    num_read = []
    read = Context.read

    def noted(context: Context, *args: Any) -> Any:
        num_read.append(len(context.lengths))
        return read(context, *args)

    monkeypatch.setattr(Context, "read", noted)
    start(lane, *states)
    assert num_read == [1]
    finish(lane)
    alone = decoder.generate_batch([work.prompt] * 4, seed=3, **work.options)
    assert [state.new_token_ids for state in states] == [own.new_token_ids for own in alone]
    if options == "sampled":
        assert len({tuple(state.new_token_ids) for state in states}) > 1
    assert first.new_token_ids == _works(options)[0].alone(decoder).new_token_ids


class Forces(LogitsProcessor):
    """Processor that leaves only one token at one position, and excludes it everywhere else."""

    def __init__(self, token: int, length: int) -> None:
        self.token, self.length = token, length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] != self.length:
            scores = scores.clone()
            scores[:, self.token] = -torch.inf
            return scores
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.token] = 0.0
        return forced


@pytest.mark.parametrize("is_cleared", [True, False])
def test_a_failed_sequence_leaves_no_nan_in_its_place(
    is_cleared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama(vocab=11)
    decoder = _decoder(model, "none", "greedy")
    with torch.no_grad():
        model.get_input_embeddings().weight[10] = torch.nan
    if not is_cleared:
        append = SequenceStorage.append

        def planted(own: SequenceStorage, other: SequenceStorage) -> None:
            own._num_left = [0] * own.num_rows
            append(own, other)

        monkeypatch.setattr(SequenceStorage, "append", planted)
    never = {"logits_processor": LogitsProcessorList([Forces(10, 99)])}
    # Joining overwrites the first bucket of slots, so the NaN must be in the second one.
    bad = Work([1, 2, 3] * 22, 0, {"temperature": 0, "max_new_tokens": 20})
    bad.options["logits_processor"] = LogitsProcessorList([Forces(10, 70)])
    good = Work([4, 5, 6], 0, {"temperature": 0, "max_new_tokens": 80, **never})
    expected = good.alone(decoder).new_token_ids
    states = [SequenceState.of(0, request_of(decoder, work)) for work in (good, bad, good)]
    lane = lane_of(decoder, states[0].request, capacity=100)
    start(lane, states[0])
    start(lane, states[1])
    finish(lane)
    assert isinstance(states[1].error, NumericalError)
    assert states[0].new_token_ids == expected
    start(lane, states[2])
    start(lane, again := SequenceState.of(0, states[0].request))  # in the place that had NaN
    finish(lane)
    assert states[2].new_token_ids == expected
    assert (again.new_token_ids == expected) is is_cleared


def test_the_storage_of_a_lane_stays_where_it_is(model: LlamaForCausalLM) -> None:
    decoder = _decoder(model, "hybrid", "greedy")
    works = _works("greedy")
    requests = [request_of(decoder, work) for work in works]
    lane = lane_of(decoder, requests[0], places=2)
    capacity = lane.context.cache.capacity
    assert lane.num_bytes == 2 * capacity * decoder.bytes_per_token
    addresses = set()
    for request in requests:
        start(lane, SequenceState.of(0, request))
        if lane.live:
            addresses.add(lane.context.cache.slot_layers[0].keys.data_ptr())
        finish(lane)
    assert len(addresses) == 1
    assert lane.context.cache.num_rows == 2
    assert lane.context.cache.capacity == capacity
