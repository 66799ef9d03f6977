"""The texts of a reply arrive before the error that ends it."""

import asyncio

import pytest
from helpers.lanes import Work, requests_of
from helpers.serving import tiny_decoder

from inference.engine.decode_step import DecodeStep
from inference.serving.job import Job
from inference.serving.reply import Reply, Wake
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
