"""Threads submit prompts to the thread that owns the models, whose fingerprint names them."""

from threading import Event
from typing import Any

import pytest
from helpers.models import tiny_drafter, tiny_llama
from helpers.tokenizers import tiny_tokenizer
from transformers import LlamaForCausalLM

from inference import SpeculativeDecoder
from inference.autotune.costs import Costs
from inference.autotune.policy import AutoTree, ReproducibleTree
from inference.drafters.aded.drafter import AdedDrafter
from inference.drafters.lookup import LookupDrafter, LookupSettings
from inference.drafters.small_lm import SmallLMDrafter
from inference.engine.lane import Lane
from inference.protocol import Budget
from inference.serving.engine_thread import EngineThread, LoadedModel
from jakiro.errors import EngineStopped
from jakiro.target.adapter import TargetAdapter


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(vocab=11)


@pytest.fixture(scope="module")
def decoder(model: LlamaForCausalLM) -> SpeculativeDecoder:
    return SpeculativeDecoder(model, tiny_drafter(TargetAdapter(model)), tree="fixed")


def _options(index: int) -> dict[str, Any]:
    return {"temperature": 0.9 * (index % 2), "seed": index, "max_new_tokens": 6 + index}


def test_a_cancelled_job_ends_and_its_place_is_free(decoder: SpeculativeDecoder) -> None:
    with EngineThread(decoder, places=1, capacity=120) as engine:
        job = engine.submit([1, 2], temperature=0.0, max_new_tokens=110)
        next(iter(job))
        engine.cancel(job)
        steps = list(job)
        assert not any(step.finished for step in steps)
        assert list(engine.submit([1, 2], temperature=0.0, max_new_tokens=5))
        engine.cancel(job)
    engine.cancel(job)


def test_the_death_of_the_thread_is_known_to_all_requests(
    decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    may_die = Event()
    original = Lane.step

    def planted(lane: Lane) -> Any:
        if may_die.is_set():
            raise RuntimeError("the device is lost")
        return original(lane)

    monkeypatch.setattr(Lane, "step", planted)
    engine = EngineThread(decoder, places=1, capacity=120)
    jobs = [engine.submit([1, 2], temperature=0.0, max_new_tokens=110) for _ in range(3)]
    next(iter(jobs[0]))
    may_die.set()
    for job in jobs:
        with pytest.raises(EngineStopped, match="the device is lost"):
            list(job)
    with pytest.raises(EngineStopped, match="the device is lost"):
        engine.submit([1, 2], max_new_tokens=5)
    assert not engine.is_alive
    assert isinstance(engine.error, RuntimeError)
    assert "the engine has died" in caplog.text
    engine.close()


def test_close_ends_jobs_that_are_not_complete(decoder: SpeculativeDecoder) -> None:
    engine = EngineThread(decoder, places=1, capacity=120)
    jobs = [engine.submit([1, 2], temperature=0.0, max_new_tokens=110) for _ in range(2)]
    engine.close()
    for job in jobs:
        with pytest.raises(EngineStopped, match=r"close\(\) was called"):
            list(job)


def test_a_drafter_that_learns_numbers_the_requests(model: LlamaForCausalLM) -> None:
    drafter = AdedDrafter()
    decoder = SpeculativeDecoder(model, drafter, tree="fixed")
    with EngineThread(decoder, places=2, capacity=64) as engine:
        assert engine.seed_obstacle
        assert len(engine.scheduler.lanes) == 1
        jobs = [
            engine.submit([1, 2, 3], seed=1, temperature=1.0, max_new_tokens=9) for _ in range(2)
        ]
        for job in jobs:
            list(job)
    numbers = [job.request.sampling.request_index for job in jobs]
    assert numbers == [0, 1]
    drafter.reset()
    assert drafter.request_counter is not None
    assert drafter.request_counter.take().number == 0  # the tickets of both jobs have ended


def test_trees_chosen_by_measurement_have_one_size_per_lane(decoder: SpeculativeDecoder) -> None:
    other = SpeculativeDecoder(decoder.target.model, AdedDrafter(), tree="fixed")
    other.policy = AutoTree(Budget(8, 4), Costs(verify={0: 1.0, 8: 1.1}, draft={}))
    with EngineThread(other, places=2, capacity=64) as engine:
        assert isinstance(engine.policy, ReproducibleTree)
        assert list(engine.submit([1, 2, 3], temperature=0.0, max_new_tokens=9))


def test_functions_run_between_the_steps_of_requests_which_keep_their_tokens(
    decoder: SpeculativeDecoder,
) -> None:
    options: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 40}
    with EngineThread(decoder, places=2, capacity=64) as engine:
        job = engine.submit([1, 2, 3], **options)
        scheduler = engine.scheduler
        calls = [engine.call(lambda: scheduler.num_running) for _ in range(20)]
        tokens = [token for step in job for token in step.token_ids]
        running = [call.result(30) for call in calls]
    assert tokens == decoder.generate([1, 2, 3], **options).new_token_ids
    assert max(running) == 1


def test_a_function_that_fails_or_was_cancelled_harms_nobody(decoder: SpeculativeDecoder) -> None:
    has_begun, may_go_on = Event(), Event()

    def waits() -> None:
        has_begun.set()
        may_go_on.wait(30)

    with EngineThread(decoder, places=1, capacity=32) as engine:
        engine.call(waits)
        assert has_begun.wait(30)
        cancelled = engine.call(lambda: 1)
        assert cancelled.cancel()
        failing = engine.call(lambda: [][1])
        may_go_on.set()
        with pytest.raises(IndexError):
            failing.result(30)
        assert list(engine.submit([1, 2], temperature=0.0, max_new_tokens=5))


def _fingerprint(decoder: SpeculativeDecoder) -> str:
    with EngineThread(decoder, places=2, capacity=32) as engine:
        return LoadedModel(engine).fingerprint


def test_the_fingerprint_depends_on_the_drafter_and_its_weights() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_llama(vocab=len(tokenizer))
    target = TargetAdapter(model)
    drafters = [
        *(tiny_drafter(target, seed=seed) for seed in (0, 1)),
        LookupDrafter(),
        None,
        *(SmallLMDrafter(tiny_llama(vocab=len(tokenizer), seed=seed), model) for seed in (2, 3)),
    ]
    decoders = [SpeculativeDecoder(model, drafter, tokenizer, tree="fixed") for drafter in drafters]
    found = list(map(_fingerprint, decoders))
    assert len(set(found)) == len(found)
    assert _fingerprint(decoders[1]) == found[1]


def test_the_fingerprint_depends_on_the_trees() -> None:
    found = set()
    for depth in (2, 3):
        tokenizer = tiny_tokenizer()
        model = tiny_llama(vocab=len(tokenizer))
        drafter = LookupDrafter(LookupSettings(depth=depth))
        decoder = SpeculativeDecoder(model, drafter, tokenizer, tree="fixed")
        found.add(_fingerprint(decoder))
    assert len(found) == 2
