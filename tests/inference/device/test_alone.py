"""A drafter writes token by token, and forgets what it has written."""

from typing import Any

import pytest
import torch
from helpers.models import tiny_llama
from transformers import LogitsProcessorList

from inference.device.alone import AloneWriter, alone_key
from inference.device.drafting import DeviceDrafting
from inference.drafters.aded.drafter import AdedDrafter
from inference.drafters.lookup import LookupDrafter
from inference.drafters.small_lm import SmallLMDrafter
from inference.protocol import Drafter
from inference.remote.integer_distribution import TOTAL
from inference.remote.messages import TreeLimits
from inference.sampling.options import Sampling
from inference.sampling.random_numbers import random_stream

PROMPT = [5, 6, 7, 8, 5, 6, 7, 8, 5]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


def _drafting(drafter: Drafter | None, samples: bool = False) -> DeviceDrafting:
    sampling = Sampling(LogitsProcessorList(), samples, seed=3, quantizes_drafts=True)
    return DeviceDrafting(drafter, sampling, TreeLimits(), 100, torch.device("cpu"))


def _written(drafting: DeviceDrafting, count: int, attempt: int = 1) -> list[Any]:
    writer = AloneWriter(drafting, PROMPT, 2, attempt, count)
    tokens: list[Any] = []
    for _ in range(count):
        token = writer.next([own.token_id for own in tokens])
        if token is None:
            break
        tokens.append(token)
    writer.stop()
    return tokens


def test_a_model_writes_its_own_greedy_text(model: Any) -> None:
    drafting = _drafting(SmallLMDrafter(model, model))
    tree = drafting.tree(PROMPT, 1)
    found = [token.token_id for token in _written(drafting, 12)]
    ids = torch.tensor([PROMPT])
    whole = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert found == whole[0, len(PROMPT) :].tolist()
    assert drafting.tree(PROMPT, 1) == tree  # nothing is left of it


def test_sampled_tokens_keep_their_distributions(model: Any) -> None:
    drafting = _drafting(SmallLMDrafter(model, model), samples=True)
    tokens = _written(drafting, 6)
    assert tokens == _written(drafting, 6)
    assert tokens != _written(drafting, 6, attempt=2)
    for token in tokens:
        assert sum(token.weights) == TOTAL
        assert token.weights[token.ids.index(token.token_id)] > 0


@pytest.mark.parametrize("drafter", [LookupDrafter(), AdedDrafter()], ids=repr)
def test_found_text_is_repeated(drafter: Drafter) -> None:
    found = [token.token_id for token in _written(_drafting(drafter), 5)]
    assert found == [6, 7, 8, 5, 6]


def test_nothing_is_written_without_a_drafter() -> None:
    assert _written(_drafting(None), 5) == []


def test_random_numbers_are_used_once() -> None:
    step = (3, 0, 0, 5)
    keys = [alone_key(step, attempt, number) for attempt in (1, 2) for number in (1, 2)]
    drafts = [(*step, purpose) for purpose in (0, 1)] + [(3, 0, 0, 6, 1)]
    numbers = {random_stream(*key).random() for key in [*keys, *drafts]}
    assert len(numbers) == len(keys) + len(drafts)
