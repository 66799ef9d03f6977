"""Texts arrive before the error that ends a reply, and a reply ends in time."""

import asyncio

import pytest
from helpers.serving import tiny_decoder

from inference.engine.decode_step import DecodeStep
from inference.serving.decoding_options import DecodingOptions
from inference.serving.engine_thread import EngineThread, LoadedModel
from inference.serving.reply import Reply
from jakiro.errors import EngineStopped


@pytest.mark.parametrize(("stops", "text"), [((), "a"), (("ab",), "")])  # "ab" holds back "a"
def test_an_error_right_after_a_step_is_raised_at_once(stops: tuple[str, ...], text: str) -> None:
    decoder = tiny_decoder()
    token = decoder.tokenizer.encode("a", add_special_tokens=False)[0]

    async def read_until_error(reply: Reply) -> str:
        found = ""
        try:
            async for delta in reply.deltas():
                found += delta.text
        except EngineStopped:
            return found
        pytest.fail("no error")

    async def read() -> str:
        with EngineThread(decoder, places=1, capacity=64) as engine:
            reply = Reply([[1, 2]], DecodingOptions(max_new_tokens=9, stops=stops))
            model = LoadedModel(engine)
            engine.start = lambda _: None  # type: ignore[method-assign]
            reply.prepare(model)
            reply.start(model)
            (job,) = reply.jobs
            job.deliver(DecodeStep([token], [0], finished=False))
            job.end(EngineStopped("the engine has stopped"))
            return await read_until_error(reply)

    assert asyncio.run(asyncio.wait_for(read(), 5)) == text
