"""Texts arrive before the error that ends a reply, and a cancellation is never lost."""

import asyncio

import pytest
from helpers.lanes import Work, requests_of
from helpers.serving import tiny_decoder

from inference.engine.decode_step import DecodeStep
from inference.serving.answers.reply import Reply, Wake
from inference.serving.scheduling.job import Job
from jakiro.errors import EngineStopped

WORK = Work([1, 2], 0, {"temperature": 0, "max_new_tokens": 9})


def test_an_error_right_after_a_step_is_raised_at_once() -> None:
    decoder = tiny_decoder()
    assert decoder.tokenizer is not None
    token = decoder.tokenizer.encode("a", add_special_tokens=False)[0]

    async def read() -> str:
        wake = Wake()
        job = Job(requests_of(decoder, WORK, 1), wake.notify)
        reply = Reply([job], wake, decoder.tokenizer, ())
        job.deliver(DecodeStep([token], [0], finished=False))
        job.end(EngineStopped("the engine has stopped"))
        arriving = aiter(reply.deltas())
        text = "".join(delta.text for delta in await anext(arriving))
        with pytest.raises(EngineStopped):
            await anext(arriving)
        return text

    assert asyncio.run(asyncio.wait_for(read(), 5)) == "a"


def test_an_error_right_after_a_step_without_text_is_raised_at_once() -> None:
    decoder = tiny_decoder()
    assert decoder.tokenizer is not None
    token = decoder.tokenizer.encode("a", add_special_tokens=False)[0]

    async def read() -> None:
        wake = Wake()
        job = Job(requests_of(decoder, WORK, 1), wake.notify)
        reply = Reply([job], wake, decoder.tokenizer, ("ab",))  # holds back "a"
        job.deliver(DecodeStep([token], [0], finished=False))
        job.end(EngineStopped("the engine has stopped"))
        with pytest.raises(EngineStopped):
            _ = [delta async for delta in reply.deltas()]

    asyncio.run(asyncio.wait_for(read(), 5))


@pytest.mark.parametrize("pauses", range(4))
def test_a_cancellation_that_arrives_with_a_step_is_not_lost(pauses: int) -> None:
    async def wait() -> None:
        wake = Wake()
        task = asyncio.ensure_future(wake.wait(5.0))
        for _ in range(3):
            await asyncio.sleep(0)
        wake.notify()
        for _ in range(pauses):
            await asyncio.sleep(0)
        if task.cancel():  # the task had not ended before
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(wait())


def test_waiting_without_a_step_ends_after_some_time() -> None:
    async def wait() -> bool:
        return await Wake().wait(0.01)

    assert not asyncio.run(wait())
