"""A replayed text has the steps with which it was decoded, and drafters are compared by them."""

from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.mixed_prompts import RECORDS, write_target_and_prompts
from helpers.models import tiny_drafter, tiny_llama
from helpers.quick import mostly_slow
from helpers.variants import VARIANTS
from rich.console import Console
from transformers import LlamaForCausalLM

from inference import SpeculativeDecoder
from inference.benchmark.document import ComparisonDocument
from inference.benchmark.replay import replay
from inference.benchmark.report import show
from inference.benchmark.run import compare, prompts_for
from inference.benchmark.settings import ComparisonSettings
from inference.benchmark.subject import Subject
from inference.drafters.small_lm import SmallLMDrafter, SmallLMSettings
from inference.engine.stats import DecodeStats
from inference.trees.shape import TreePlan, TreeShape
from jakiro.errors import DataError
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.pretrained import load_target

PROMPTS = [[5, 6, 7], [9], [3, 1, 4, 1, 5, 9, 2, 6, 5], [8, 8]]
LIMIT = 16
QUICK = ("chimera", "hybrid-mixture-P2", "tail-1")


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


def _counts(stats: DecodeStats) -> dict[str, Any]:
    counts = dict(vars(stats))
    del counts["seconds"]
    return counts


def _same_steps(
    decoder: SpeculativeDecoder, temperature: float, **options: Any
) -> list[DecodeStats]:
    """Decode prompts, replay the texts, and return their counts, which must be the same."""
    options |= {"temperature": temperature, "max_new_tokens": LIMIT}
    seeds = list(range(len(PROMPTS)))
    outputs = decoder.generate_batch(PROMPTS, seed=seeds, **options)
    run = decoder.start(PROMPTS, seed=0, **options)
    replayed = replay(run, [output.new_token_ids for output in outputs])
    assert run.is_closed
    assert list(map(_counts, replayed)) == [_counts(output.stats) for output in outputs]
    return replayed


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", mostly_slow(sorted(VARIANTS), quick=QUICK))
def test_trained_drafters(model: LlamaForCausalLM, name: str, temperature: float) -> None:
    drafter = tiny_drafter(TargetAdapter(model), VARIANTS[name])
    shape = TreeShape(**drafter.levels, children=5, num_nodes=30)
    _same_steps(SpeculativeDecoder(model, drafter, tree=TreePlan.of(shape)), temperature, top_k=4)


def test_a_smaller_model_and_texts_that_end_at_different_places(model: LlamaForCausalLM) -> None:
    small = SmallLMDrafter(model, model, SmallLMSettings(depth=4, children=2, breadth=2))
    decoder = SpeculativeDecoder(model, small, tree="fixed")
    full = decoder.generate(PROMPTS[0], temperature=0.0, max_new_tokens=LIMIT).new_token_ids
    counts = _same_steps(decoder, 0.0, eos_token_id=full[5])
    assert sum(stats.accepted.total() for stats in counts) > 0


@pytest.mark.slow
def test_a_long_text_moves_as_a_whole_when_a_shorter_one_ends(model: LlamaForCausalLM) -> None:
    drafter = tiny_drafter(TargetAdapter(model))
    shape = TreeShape(**drafter.levels, children=2, num_nodes=4)
    decoder = SpeculativeDecoder(model, drafter, tree=TreePlan.of(shape))
    options: dict[str, Any] = {"temperature": 1.0, "top_k": 2, "max_new_tokens": 110}
    (output,) = decoder.generate_batch(PROMPTS[:1], seed=0, **options)
    assert output.stats.accepted
    run = decoder.start([PROMPTS[1], PROMPTS[0]], seed=0, **options)
    _, replayed = replay(run, [[4, 5], output.new_token_ids])
    assert _counts(replayed) == _counts(output.stats)


def test_trees_are_cut_where_the_target_reads_no_further_tokens(model: LlamaForCausalLM) -> None:
    decoder = SpeculativeDecoder(model, tiny_drafter(TargetAdapter(model)), tree="fixed")
    prompt = [1 + index % 50 for index in range(model.config.max_position_embeddings - LIMIT)]
    (output,) = decoder.generate_batch([prompt], temperature=0.0, max_new_tokens=LIMIT)
    run = decoder.start([prompt], temperature=0.0, max_new_tokens=LIMIT)
    (replayed,) = replay(run, [output.new_token_ids])
    assert _counts(replayed) == _counts(output.stats)


TREES = "candidates=60"
Replayed = Callable[..., ComparisonDocument]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, four drafters and a file of prompts."""
    path = tmp_path_factory.mktemp("replay")
    target = write_target_and_prompts(path)
    for seed in range(4):
        tiny_drafter(target, seed=seed).save_pretrained(path / f"drafter-{seed}")
    return path


@pytest.fixture(scope="module")
def subject(folder: Path) -> Subject:
    return Subject(*load_target(str(folder / "target"), "float32", torch.device("cpu")))


@pytest.fixture(scope="module")
def compared(folder: Path, subject: Subject) -> Replayed:
    """A function that replays the drafters with the given names, which have rising numbers."""

    def run(*names: str, options: str = TREES, **changes: Any) -> ComparisonDocument:
        methods = tuple(
            f"drafter={folder / f'drafter-{number}'},{options},name={name}"
            for number, name in enumerate(names)
        )
        fields: dict[str, Any] = {"prompts": str(folder / "prompts.jsonl"), "max_new_tokens": 7}
        settings = ComparisonSettings(methods=methods, replay=True, **fields | changes)
        return compare(settings, prompts_for(settings), subject, "tiny")

    return run


def test_greedy_figures_are_those_of_decoding(
    folder: Path, subject: Subject, compared: Replayed
) -> None:
    drafter = f"drafter={folder / 'drafter-0'},{TREES}"
    settings = ComparisonSettings(
        methods=(drafter,), prompts=str(folder / "prompts.jsonl"), max_new_tokens=7
    )
    decoded = compare(settings, prompts_for(settings), subject, "tiny").methods[0]
    (one,) = compared("only", batch_size=3).methods
    assert one.tau == pytest.approx(decoded.tau)
    assert one.conditional_acceptance_rate == decoded.conditional_acceptance_rate
    counts = [
        {(one.prompt, one.category, one.decoded, one.target_forwards) for one in method.samples}
        for method in (one, decoded)
    ]
    assert counts[0] == counts[1]


def test_all_drafters_get_the_same_texts(compared: Replayed) -> None:
    document = compared("a", "b", temperatures=(0.0, 1.0), batch_size=8)
    families = [(method.family, method.temperature) for method in document.methods]
    assert families == [(name, temperature) for temperature in (0.0, 1.0) for name in "ab"]
    num_turns = sum(len(record.get("turns", "1")) for record in RECORDS)
    for first, second in zip(document.methods[::2], document.methods[1::2], strict=True):
        assert first.tokens == second.tokens == 7 * num_turns
        decoded = [[one.decoded for one in method.samples] for method in (first, second)]
        assert decoded[0] == decoded[1]
    (small,) = compared("a", options="candidates=20,levels=1").methods
    depths = [len(one.conditional_acceptance_rate) for one in (small, document.methods[0])]
    assert depths[0] < depths[1]


def test_one_prompt_is_too_few_for_an_interval(compared: Replayed) -> None:
    with pytest.raises(DataError, match="more than one prompt"):
        compared("a", "b", num_prompts=1)


def test_trainings_with_the_same_name_are_pooled_and_the_first_name_is_the_baseline(
    compared: Replayed,
) -> None:
    document = compared("a", "b", "a", "b")
    screen = StringIO()
    show(document, Console(file=screen, width=120))
    lines = map(str.split, screen.getvalue().splitlines())
    rows = [words for words in lines if words[:1] in (["a"], ["b"])]
    assert [row[0] for row in rows] == ["a", "b"]
    pooled = {}
    for name in "ab":
        of_name = [method for method in document.methods if method.family == name]
        samples = [sample for method in of_name for sample in method.samples]
        steps = sum(sample.target_forwards for sample in samples)
        pooled[name] = sum(sample.decoded for sample in samples) / steps
    assert [row[1] for row in rows] == [f"{tau:.2f}" for tau in pooled.values()]
    ratios = [1.0, pooled["b"] / pooled["a"]]
    assert [row[4] for row in rows] == [f"{ratio:.3f}" for ratio in ratios]
    assert rows[0][5:7] == ["[1.000,", "1.000]"]
