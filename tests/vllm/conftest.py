"""A target and its greedy texts, which the tests inside vLLM share."""

import pytest
from helpers.vllm_drafters import target_model
from helpers.vllm_world import World, world_of


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A target and its greedy texts."""
    return world_of(target_model(), tmp_path_factory.mktemp("target"))
