"""A small language model as the drafter: the output is the target's, and the cache is exact."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from helpers.drafting import commit_of
from helpers.losslessness import (
    assert_follows_distribution,
    greedy_by_transformers,
)
from helpers.models import tiny_llama
from helpers.tokenizers import tiny_tokenizer
from transformers import LlamaForCausalLM, LogitsProcessorList
from transformers.generation import TemperatureLogitsWarper

from inference import SpeculativeDecoder
from inference.draft_tree import CandidateKind, DraftTree
from inference.drafters.small_lm import (
    WAITING,
    LMPass,
    SmallLMDrafter,
    SmallLMSession,
    SmallLMSettings,
)
from inference.protocol import Budget, Committed
from inference.sampling.options import Sampling
from inference.sampling.random_numbers import StepRandom
from jakiro.errors import CheckpointError, TargetMismatch

GREEDY = Sampling(LogitsProcessorList(), do_sample=False)
VOCAB = 61
START = [1, 2, 3, 4]


@pytest.fixture(autouse=True)
def _inference_mode() -> Iterator[None]:
    """Run each test in inference mode, as an engine runs its sessions."""
    with torch.inference_mode():
        yield


def _small(model: LlamaForCausalLM, **changes: object) -> LlamaForCausalLM:
    """Return a model that often agrees with the target: it has the target's first layers."""
    fields = {"vocab": model.config.vocab_size, "num_hidden_layers": 2, **changes}
    small = tiny_llama(**fields)
    for name, parameter in small.named_parameters():
        other = model.get_parameter(name)
        rows = min(len(parameter), len(other))
        parameter.data[:rows] = other.data[:rows]
    return small


def _drafter(model: LlamaForCausalLM, **settings: object) -> SmallLMDrafter:
    return SmallLMDrafter(_small(model), model, SmallLMSettings(**settings))


def _spoilt(model: LlamaForCausalLM, tokens: slice) -> SmallLMDrafter:
    """Return a drafter whose small model has NaN logits after some tokens."""
    drafter = _drafter(model)  # refuses a model with NaN, so NaN comes after
    table = drafter.model.model.get_input_embeddings().weight
    table.data = table.data.clone()
    table.data[tokens] = float("nan")
    return drafter


@pytest.mark.slow
@pytest.mark.parametrize(("samples", "batch"), [(80, 1), (600, 300)])
def test_a_small_model_with_nan_costs_speed_but_not_exactness(samples: int, batch: int) -> None:
    model = tiny_llama(vocab=23)
    decoder = SpeculativeDecoder(model, _spoilt(model, slice(5, 14)), tree="fixed")
    assert assert_follows_distribution(decoder, model, 1.0, samples, batch).accepted.total() > 20
    silent = SpeculativeDecoder(model, _spoilt(model, slice(0, 23)), tree="fixed")
    for temperature in (0.0, 1.0):
        output = silent.generate([1, 2], temperature=temperature, seed=0, max_new_tokens=9)
        assert output.stats.accepted.total() == 0
    assert silent.generate([1, 2], max_new_tokens=9).sequences[0].tolist() == (
        greedy_by_transformers(model, [1, 2], 9)
    )


def test_draft_probs_are_processed_like_those_of_the_target() -> None:
    model = tiny_llama(vocab=31)
    small = _small(model)
    drafter = SmallLMDrafter(small, model)
    warm = Sampling(LogitsProcessorList([TemperatureLogitsWarper(0.5)]), do_sample=True)
    tree = _proposed(drafter, [1, 2, 3, 4, 5], warm, Budget(28))
    assert tree.draft_probs is not None
    assert set(tree.kind.flatten().tolist()) == {CandidateKind.SAMPLED}
    row = tree.sequence_tree()
    assert sorted({len(row.path(node)) for node in row.sampled}) == [0, 1, 2]
    for node in row.sampled:  # the root, and the nodes that were expanded
        path = [row.token_ids[index] for index in row.path(node)]
        ids, probs = row.draft_distribution(node)
        logits = small(torch.tensor([[1, 2, 3, 4, 5, *path]])).logits[0, -1]
        expected = (logits / 0.5).softmax(-1)[ids]
        torch.testing.assert_close(probs, expected, atol=1e-5, rtol=1e-4)
    for siblings in row.sampled.values():
        assert len({row.token_ids[node] for node in siblings}) == len(siblings)


def test_after_rejections_the_cache_is_that_of_a_fresh_prefill() -> None:
    model = tiny_llama(vocab=31)
    drafter = _drafter(model)
    session = drafter.new_session(GREEDY, capacity=100)
    tokens = [1, 2, 3, 4]
    session.advance(_committed([tokens], [3]))
    for taken in (0, 2, 1, 3, 2):
        tree = session.propose(Budget(28), StepRandom())
        tokens += [*_some_path(tree, taken), 7]
        session.advance(_committed([tokens], [taken + 1]))
        fresh = drafter.new_session(GREEDY, capacity=100)
        fresh.advance(_committed([tokens], [len(tokens) - 1]))
        again, expected = (each.propose(Budget(28), StepRandom()) for each in (session, fresh))
        assert again.token_ids.tolist() == expected.token_ids.tolist()
        torch.testing.assert_close(again.score, expected.score, atol=1e-5, rtol=1e-5)
        slots = torch.arange(len(tokens))[None]
        kv = [own.cache.kv(slots, (0, 1)) for own in (session, fresh)]
        torch.testing.assert_close(*kv, atol=1e-5, rtol=1e-5)


def test_a_budget_narrows_trees_before_sampling() -> None:
    drafter = _drafter(tiny_llama(vocab=31))
    assert drafter.max_nodes == 28
    sampling_options = Sampling(LogitsProcessorList(), do_sample=True)
    for sampling in (GREEDY, sampling_options):
        assert _proposed(drafter, [1, 2, 3], sampling, Budget(0)).num_nodes == 0
        assert _proposed(drafter, [1, 2, 3], sampling, Budget(9, 0)).num_nodes == 0
        assert _proposed(drafter, [1, 2, 3], sampling, Budget(28, 1)).num_nodes == 4
    assert [
        _proposed(drafter, [1, 2], sampling_options, Budget(n)).num_nodes for n in (19, 5, 2)
    ] == [
        15,
        3,
        2,
    ]
    assert _proposed(drafter, [1, 2], GREEDY, Budget(19)).num_nodes == 19
    deterministic = _drafter(tiny_llama(vocab=31), sampled=False, num_nodes=6)
    tree = _proposed(deterministic, [1, 2], sampling_options, Budget(28))
    assert tree.num_nodes == deterministic.max_nodes == 6
    assert set(tree.kind.flatten().tolist()) == {CandidateKind.DETERMINISTIC}


def test_trees_end_where_the_small_model_has_no_more_positions() -> None:
    model = tiny_llama(vocab=31)
    small = _small(model, max_position_embeddings=16)
    decoder = SpeculativeDecoder(model, SmallLMDrafter(small, model), tree="fixed")
    output = decoder.generate([1, 2, 3], max_new_tokens=40)
    assert output.sequences[0].tolist() == greedy_by_transformers(model, [1, 2, 3], 40)
    assert max(position for position, depth in enumerate(output.depths, start=3) if depth) <= 16


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_llama(vocab=len(tokenizer))
    folder = str(tmp_path)
    with pytest.raises(CheckpointError, match="cannot load"):
        SmallLMDrafter.from_pretrained(folder, model, tokenizer)
    _small(model).save_pretrained(folder)
    tiny_tokenizer(texts=("something else entirely " * 40,)).save_pretrained(folder)
    with pytest.raises(TargetMismatch, match="does not have the target's tokenizer"):
        SmallLMDrafter.from_pretrained(folder, model, tokenizer)
    tokenizer.save_pretrained(folder)
    drafter = SmallLMDrafter.from_pretrained(folder, model, tokenizer)
    assert drafter.vocab_size == len(tokenizer)


def _proposed(
    drafter: SmallLMDrafter, tokens: list[int], sampling: Sampling, budget: Budget
) -> DraftTree:
    session: SmallLMSession = drafter.new_session(sampling, capacity=64)
    session.advance(_committed([tokens], [len(tokens) - 1]))
    return session.propose(budget, StepRandom([(5,)]))


def _some_path(tree: DraftTree, length: int) -> list[int]:
    """Return the tokens of the path to the last candidate at depth `length`."""
    row = tree.sequence_tree()
    if length == 0:
        return []
    node = max(node for node, depth in enumerate(row.depth) if depth == length)
    return [row.token_ids[index] for index in row.path(node)]


@pytest.fixture
def model() -> LlamaForCausalLM:
    return tiny_llama(vocab=VOCAB, num_hidden_layers=2)


def _cache(model: LlamaForCausalLM, batch: int = 1, vocab_size: int = VOCAB) -> SmallLMSession:
    drafter = SmallLMDrafter(model, model, SmallLMSettings(depth=3, breadth=3))
    drafter.vocab_size = vocab_size
    return drafter.new_session(GREEDY, capacity=100, batch=batch)


def _committed(rows: Sequence[list[int]], counts: Sequence[int]) -> Committed:
    """Return a commit of the last `counts` tokens of each sequence before its root."""
    ends = tuple(len(row) - 1 for row in rows)
    width = max(counts)
    verified = [
        [*row[end - count : end], *[0] * (width - count)]
        for row, end, count in zip(rows, ends, counts, strict=True)
    ]
    roots = torch.tensor([row[-1:] for row in rows])
    return commit_of(ends, tuple(counts), torch.tensor(verified), roots, None)


def _started(cache: SmallLMSession, *rows: list[int]) -> LMPass:
    cache.advance(_committed(rows, [len(row) - 1 for row in rows]))
    return cache.start_tree()


def _expected(model: LlamaForCausalLM, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)


def test_tokens_that_only_the_small_model_has_are_no_candidates(model: LlamaForCausalLM) -> None:
    found = _started(_cache(model, vocab_size=40), START).joint(1, None)[0, 0, 0]
    assert len(found) == 40
    assert float(found.exp().sum()) == pytest.approx(1.0)


@pytest.mark.parametrize(("length", "num_read"), [(WAITING, 0), (WAITING + 10, WAITING + 9)])
def test_long_texts_are_read_before_a_tree_is_requested(
    model: LlamaForCausalLM, length: int, num_read: int
) -> None:
    text = [1 + number % 60 for number in range(length)]
    cache = _cache(model)
    cache.advance(_committed([text], [length - 1]))
    assert cache._num_read == [num_read]
    found = cache.start_tree().joint(1, None)[0, 0, 0]
    torch.testing.assert_close(found, _expected(model, text), atol=1e-4, rtol=1e-4)
