"""A replayed text has the steps with which it was decoded, and drafters are compared by them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.mixed_prompts import RECORDS, write_target_and_prompts
from helpers.models import tiny_drafter, tiny_llama
from helpers.quick import mostly_slow
from helpers.variants import VARIANTS
from transformers import LlamaForCausalLM

from inference import SpeculativeDecoder
from inference.benchmark.replay import Replay, ReplayDocument, replay
from inference.benchmark.run import Comparison, prompts_for
from inference.benchmark.settings import ComparisonSettings, parse_methods
from inference.benchmark.subject import Subject, build_methods
from inference.drafters.small_lm import SmallLMDrafter, SmallLMSettings
from inference.engine.stats import DecodeStats
from inference.trees.shape import TreePlan, TreeShape
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
Replayed = Callable[..., ReplayDocument]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, three drafters and a file of prompts."""
    path = tmp_path_factory.mktemp("replay")
    target = write_target_and_prompts(path)
    for seed in range(3):
        tiny_drafter(target, seed=seed).save_pretrained(path / f"drafter-{seed}")
    return path


@pytest.fixture(scope="module")
def subject(folder: Path) -> Subject:
    return Subject(*load_target(str(folder / "target"), "float32", torch.device("cpu")))


@pytest.fixture(scope="module")
def replayed(folder: Path, subject: Subject) -> Replayed:
    """A function that replays the drafters with the given names, which have rising numbers."""

    def run(*names: str, options: str = TREES, **changes: Any) -> ReplayDocument:
        methods = tuple(
            f"drafter={folder / f'drafter-{number}'},{options},name={name}"
            for number, name in enumerate(names)
        )
        fields: dict[str, Any] = {"prompts": str(folder / "prompts.jsonl"), "max_new_tokens": 7}
        settings = ComparisonSettings(methods=methods, **fields | changes)
        return Replay(settings, subject, "tiny").run()

    return run


def test_greedy_figures_are_those_of_decoding(
    folder: Path, subject: Subject, replayed: Replayed
) -> None:
    drafter = f"drafter={folder / 'drafter-0'},{TREES}"
    settings = ComparisonSettings(
        methods=(drafter,), prompts=str(folder / "prompts.jsonl"), max_new_tokens=7
    )
    methods = build_methods(parse_methods([drafter]), subject)
    comparison = Comparison(settings, prompts_for(settings), methods, subject, "tiny")
    decoded = comparison.run().methods[0]
    (row,) = replayed("only", batch_size=3).rows
    assert row.tau.value == pytest.approx(decoded.tau)
    assert row.conditional_acceptance_rate == decoded.conditional_acceptance_rate
    assert {
        (one.prompt, one.category, one.decoded, one.target_forwards) for one in row.samples[0]
    } == {(one.prompt, one.category, one.decoded, one.target_forwards) for one in decoded.samples}


def test_all_drafters_get_the_same_texts_and_the_first_is_the_baseline(replayed: Replayed) -> None:
    document = replayed("a", "b", temperatures=(0.0, 1.0), batch_size=8)
    rows = [(row.drafter, row.temperature) for row in document.rows]
    assert rows == [(name, temperature) for temperature in (0.0, 1.0) for name in "ab"]
    for first, second in zip(document.rows[::2], document.rows[1::2], strict=True):
        assert first.ratio.value == 1.0
        assert second.ratio.value == pytest.approx(second.tau.value / first.tau.value)
        decoded = [[one.decoded for one in row.samples[0]] for row in (first, second)]
        assert decoded[0] == decoded[1]
    num_turns = sum(len(record.get("turns", "1")) for record in RECORDS)
    assert document.tokens == {0.0: 7 * num_turns, 1.0: 7 * num_turns}
    text = document.model_dump_json()
    assert ReplayDocument.model_validate_json(text).model_dump_json() == text
    (small,) = replayed("a", options="candidates=20,levels=1").rows
    assert len(small.conditional_acceptance_rate) < len(
        document.rows[0].conditional_acceptance_rate
    )


def test_trainings_with_the_same_name_are_pooled(replayed: Replayed) -> None:
    (row,) = replayed("a", "a", "a").rows
    totals = [
        (sum(p.decoded for p in one), sum(p.target_forwards for p in one)) for one in row.samples
    ]
    assert len(row.samples) == 3
    assert row.tau.by_seed == pytest.approx([decoded / steps for decoded, steps in totals])
    decoded, steps = map(sum, zip(*totals, strict=True))
    assert row.tau.value == pytest.approx(decoded / steps)
    assert row.tau.low < row.tau.value < row.tau.high
