"""`/v1/models`."""

import asyncio

import pytest
from helpers.serving import MODEL, Running
from openai import AsyncOpenAI, NotFoundError, OpenAI


def test_the_model_is_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "jakiro"


def test_another_model_is_not_found(client: OpenAI) -> None:
    with pytest.raises(NotFoundError, match="expected: tiny; got: 'other/model'") as info:
        client.models.retrieve("other/model")
    assert info.value.code == "model_not_found"
    with pytest.raises(NotFoundError, match="expected: tiny"):
        client.completions.create(model="gpt-4", prompt="a")


def test_the_asynchronous_client_works(server: Running) -> None:
    async def listed() -> list[str]:
        async with AsyncOpenAI(base_url=server.url, api_key="none") as client:
            return [model.id async for model in client.models.list()]

    assert asyncio.run(listed()) == [MODEL]
