"""One scheduler reads prompts and decodes requests of all kinds, in the order of their arrival."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.lanes import Work, requests_of
from helpers.models import tiny_drafter, tiny_llama, tiny_settings
from helpers.variants import HYBRID
from transformers import LlamaForCausalLM

from inference import SpeculativeDecoder
from inference.engine.context import Context
from inference.engine.lane import Lane
from inference.engine.prefill import Prefill
from inference.serving.engine_thread import open_lanes
from inference.serving.scheduler import Job, Scheduler
from jakiro.errors import PromptError, ResourceError
from jakiro.target.adapter import TargetAdapter

KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.1},
    {"temperature": 0, "repetition_penalty": 1.3},
]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(vocab=11)


@pytest.fixture(scope="module")
def decoder(model: LlamaForCausalLM) -> SpeculativeDecoder:
    settings = tiny_settings(trunk=HYBRID)
    return SpeculativeDecoder(model, tiny_drafter(TargetAdapter(model), settings), tree="fixed")


def _scheduler(decoder: SpeculativeDecoder, places: int = 2) -> Scheduler:
    return Scheduler(open_lanes(decoder, decoder.policy, places, capacity=60))


def _work(index: int, length: int = 10) -> Work:
    prompt = [1 + (index + step) % 9 for step in range(3 + index)]
    return Work(prompt, 20 + index, {**KINDS[index % len(KINDS)], "max_new_tokens": length})


def _job(
    scheduler: Scheduler,
    decoder: SpeculativeDecoder,
    work: Work,
    choices: int = 1,
    put: Callable[[Any], object] | None = None,
) -> Job:
    requests = requests_of(decoder, work, choices)
    return Job(requests, scheduler.lane_of(requests), put)


def _run(scheduler: Scheduler) -> int:
    turns = 0
    while scheduler.turn():
        turns += 1
    return turns


def _tokens(job: Job, choice: int = 0) -> list[int]:
    return [token for step in job if step.index == choice for token in step.token_ids]


def test_more_requests_than_places_get_the_tokens_that_they_get_alone(
    decoder: SpeculativeDecoder,
) -> None:
    scheduler, works = _scheduler(decoder), [_work(index) for index in range(9)]
    jobs = [_job(scheduler, decoder, work) for work in works]
    for job in jobs[:5]:
        scheduler.add(job)
    for _ in range(4):
        scheduler.turn()
        assert scheduler.num_running <= 4
    for job in jobs[5:]:
        scheduler.add(job)
    _run(scheduler)
    for job, work in zip(jobs, works, strict=True):
        assert _tokens(job) == work.alone(decoder).new_token_ids
        assert job.is_ended
    assert scheduler.num_running == scheduler.num_waiting == len(scheduler._running) == 0
    assert [lane.num_free for lane in scheduler.lanes] == [2, 2]


def test_greedy_requests_and_those_that_sample_have_lanes_of_their_own(
    model: LlamaForCausalLM, decoder: SpeculativeDecoder
) -> None:
    scheduler = _scheduler(decoder)
    lanes = [_job(scheduler, decoder, _work(index)).lane for index in range(4)]
    assert [scheduler.lanes.index(lane) for lane in lanes] == [0, 1, 1, 0]
    assert len(_scheduler(SpeculativeDecoder(model)).lanes) == 1
    per_token = decoder.bytes_per_token
    slots = scheduler.lanes[0].context.cache.capacity
    assert scheduler.num_bytes == 2 * 2 * slots * per_token


def test_a_long_prompt_delays_the_others_by_one_chunk_per_step(
    decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference.engine.context.PREFILL_CHUNK", 8)
    scheduler = _scheduler(decoder)
    steps: dict[str, list[Any]] = {"short": [], "long": []}
    works = {
        "short": Work([1, 2], 1, {"temperature": 0, "max_new_tokens": 50}),
        "long": Work([1, 2, 3, 4] * 10, 1, {"temperature": 0, "max_new_tokens": 5}),
    }
    jobs = {name: _job(scheduler, decoder, works[name], put=steps[name].append) for name in works}
    scheduler.add(jobs["short"])
    scheduler.turn()
    scheduler.add(jobs["long"])
    for before in range(2, 6):
        assert len(steps["short"]) == before  # its first token, and the steps so far
        scheduler.turn()
        assert steps["long"] == []
    scheduler.turn()
    assert len(steps["long"]) == 2  # its first token, and its first step


def test_short_prompts_are_read_in_the_same_turn(
    decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference.engine.context.PREFILL_CHUNK", 16)
    scheduler = _scheduler(decoder, places=8)
    works = [
        Work([1 + index, 2, 3, 4], 1, {"temperature": 0, "max_new_tokens": 9}) for index in range(8)
    ]
    jobs = [_job(scheduler, decoder, work) for work in works]
    for job in jobs:
        scheduler.add(job)
    num_running = []
    for _ in range(2):
        scheduler.turn()
        num_running.append(scheduler.num_running)
    assert num_running == [4, 8]  # 16 tokens in a turn
    _run(scheduler)
    for job, work in zip(jobs, works, strict=True):
        assert _tokens(job) == work.alone(decoder).new_token_ids


def test_all_continuations_of_a_job_wait_for_places(decoder: SpeculativeDecoder) -> None:
    scheduler, work = _scheduler(decoder, places=4), _work(1)
    one = _job(scheduler, decoder, _work(1, length=14))
    several = [_job(scheduler, decoder, work, choices=3) for _ in range(2)]
    later = _job(scheduler, decoder, _work(2))
    for job in (one, *several, later):
        scheduler.add(job)
    scheduler.turn()
    scheduler.turn()
    assert scheduler.num_running == 4
    assert scheduler.num_waiting == 2
    _run(scheduler)
    alone = decoder.generate_batch([work.prompt] * 3, seed=work.seed, **work.options)
    for job in several:
        steps = list(job)
        for choice, output in enumerate(alone):
            own = [token for step in steps if step.index == choice for token in step.token_ids]
            assert own == output.new_token_ids
    assert later.is_ended


@pytest.mark.parametrize("when", ["waiting", "reading", "running", "ended"])
def test_a_cancelled_job_frees_its_places_at_once(
    decoder: SpeculativeDecoder, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference.engine.context.PREFILL_CHUNK", 2)
    scheduler, others = _scheduler(decoder, places=1), _work(0)
    job, next_one = _job(scheduler, decoder, _work(4)), _job(scheduler, decoder, others)
    scheduler.add(job)
    turns = {"waiting": 0, "reading": 1, "running": 6, "ended": 99}[when]
    for _ in range(turns):
        scheduler.turn()
    assert (when == "running") == (scheduler.num_running == 1)
    scheduler.cancel(job)
    assert job.is_ended
    assert scheduler.num_running == scheduler.num_waiting == len(scheduler._running) == 0
    scheduler.add(next_one)
    _run(scheduler)
    assert _tokens(next_one) == others.alone(decoder).new_token_ids


def test_a_job_that_is_cancelled_before_it_is_submitted_never_starts(
    decoder: SpeculativeDecoder,
) -> None:
    scheduler, works = _scheduler(decoder), [_work(0), _work(4)]
    jobs = [_job(scheduler, decoder, work) for work in works]
    scheduler.cancel(jobs[0])
    for job in jobs:
        scheduler.add(job)
    _run(scheduler)
    assert list(jobs[0]) == []
    assert _tokens(jobs[1]) == works[1].alone(decoder).new_token_ids
    assert scheduler.num_running == len(scheduler._running) == 0


def test_requests_that_can_never_have_a_place_are_refused_at_once(
    decoder: SpeculativeDecoder,
) -> None:
    scheduler = _scheduler(decoder)
    with pytest.raises(PromptError, match=r"more continuations than the 2 places"):
        _job(scheduler, decoder, _work(1), choices=3)
    assert not scheduler.turn()


ON_GPU = torch.OutOfMemoryError("no memory")
ON_CPU = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 8 bytes")


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (Context, "read", ON_GPU),
        (Lane, "prefill_of", ON_CPU),
        (Lane, "append", ON_GPU),
        (Prefill, "select_first", ON_CPU),
    ],
)
def test_a_prompt_without_memory_is_refused_and_the_others_go_on(
    decoder: SpeculativeDecoder,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    error: Exception,
) -> None:
    scheduler, works = _scheduler(decoder), [_work(0), _work(4)]
    jobs = [_job(scheduler, decoder, work) for work in works]
    scheduler.add(jobs[0])
    scheduler.turn()

    def planted(*_: Any) -> Any:
        raise error

    scheduler.add(jobs[1])
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, planted)
        scheduler.turn()
    with pytest.raises(ResourceError, match="no memory to read the prompt"):
        list(jobs[1])
    _run(scheduler)
    assert _tokens(jobs[0]) == works[0].alone(decoder).new_token_ids
    assert scheduler.num_running == len(scheduler._running) == 0
    assert [lane.num_free for lane in scheduler.lanes] == [2, 2]
