"""A comparison measures all methods in the same way, and its figures add up."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.mixed_prompts import RECORDS, write_target_and_prompts
from helpers.models import tiny_drafter, tiny_llama

from inference.benchmark.document import ComparisonDocument
from inference.benchmark.methods import setting
from inference.benchmark.run import Comparison, prompts_for
from inference.benchmark.settings import ComparisonSettings, parse_methods
from inference.benchmark.subject import Subject, build_methods
from inference.trees.shape import TreeShape
from jakiro.errors import ConfigError, PromptError
from jakiro.utils.pretrained import load_target

NEW_TOKENS = 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, a drafter, a smaller model and a file of prompts."""
    path = tmp_path_factory.mktemp("comparison")
    tiny_drafter(write_target_and_prompts(path)).save_pretrained(path / "drafter")
    tiny_llama(vocab=300, num_hidden_layers=1).save_pretrained(path / "small")
    return path


@pytest.fixture(scope="module")
def subject(folder: Path) -> Subject:
    """The loaded target and its tokenizer."""
    return Subject(*load_target(str(folder / "target"), "float32", torch.device("cpu")))


@pytest.fixture(scope="module")
def compared(folder: Path, subject: Subject) -> Callable[..., ComparisonDocument]:
    """A function that runs a comparison."""

    def run(*methods: str, **changes: Any) -> ComparisonDocument:
        settings = _settings(folder, *methods, **changes)
        built = build_methods(parse_methods(methods), subject)
        return Comparison(settings, prompts_for(settings), built, subject, "tiny").run()

    return run


@pytest.fixture(scope="module")
def everything(folder: Path, compared: Callable[..., ComparisonDocument]) -> ComparisonDocument:
    """The results of all methods on all prompts."""
    return compared(
        "transformers",
        "transformers-lookup",
        f"transformers-assisted={folder / 'small'}",
        "autoregressive",
        f"drafter={folder / 'drafter'},candidates=6",
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_compiled_generation_is_measured_with_the_same_tokens(
    compared: Callable[..., ComparisonDocument],
) -> None:
    document = compared("transformers", "transformers-compiled")
    one, other = (
        document.figures("transformers", 0.0),
        document.figures("transformers-compiled", 0.0),
    )
    assert other.identical_to_target
    assert other.tau == one.tau == 1


def _settings(folder: Path, *names: str, **changes: Any) -> ComparisonSettings:
    fields = {
        "methods": names,
        "prompts": str(folder / "prompts.jsonl"),
        "max_new_tokens": NEW_TOKENS,
        "temperatures": (0.0, 1.0),
        **changes,
    }
    return ComparisonSettings(**fields)


def test_all_methods_are_measured_and_greedy_tokens_are_those_of_the_target(
    everything: ComparisonDocument,
) -> None:
    document = everything
    assert document.baseline == "transformers"
    assert document.prompts == len(RECORDS)
    assert len(document.methods) == 5 * 2
    for method in document.methods:
        assert method.identical_to_target is (None if method.temperature else True)
        assert {sample.prompt for sample in method.samples} == {
            sample.prompt for sample in document.methods[0].samples
        }
        assert len(method.samples) == len(RECORDS)
        assert sum(sample.turns for sample in method.samples) == len(RECORDS) + 1
        assert method.tokens == sum(sample.tokens for sample in method.samples)
        assert method.speedup_low <= method.speedup <= method.speedup_high
        assert method.categories.keys() == {"code", "chat", "ids"}
        assert method.inter_token.p50 > 0
        assert method.time_to_first_token.p50 > 0
    alone = document.figures("autoregressive", 0.0)
    assert alone.tau == 1.0
    assert alone.tokens == (len(RECORDS) + 1) * NEW_TOKENS
    assert alone.seconds.draft < alone.seconds.verify
    assert document.figures("transformers", 1.0).speedup == 1.0


def test_figures_of_a_drafter_add_up(everything: ComparisonDocument) -> None:
    for temperature in (0.0, 1.0):
        one = everything.figures("drafter", temperature)
        turns = sum(sample.turns for sample in one.samples)
        assert one.tau == pytest.approx((one.tokens - turns) / one.target_forwards)
        assert one.tree is not None
        assert one.tree.max_nodes <= 6
        assert sum(expert.proposed for expert in one.experts) > 0
        accepted = sum(expert.accepted for expert in one.experts)
        assert accepted == pytest.approx(
            sum(one.acceptance_rate_per_position) * one.target_forwards
        )
        seconds = sum(sample.seconds for sample in one.samples)
        assert sum(one.seconds.model_dump().values()) == pytest.approx(seconds)
        assert one.tokens_per_second == pytest.approx(one.tokens / seconds)
        assert one.parameters > 0


def test_prompts_decoded_together_give_the_same_greedy_tokens(
    folder: Path, compared: Callable[..., ComparisonDocument]
) -> None:
    document = compared(
        "transformers",
        "autoregressive",
        f"drafter={folder / 'drafter'}",
        batch_size=2,
        temperatures=(0.0,),
    )
    for method in document.methods:
        assert method.identical_to_target
        assert method.tokens == (len(RECORDS) + 1) * NEW_TOKENS
        assert {sample.group for sample in method.samples} == {0, 1, 2}


def test_a_drafter_without_experts_has_no_figures_of_experts(
    compared: Callable[..., ComparisonDocument],
) -> None:
    figures = compared("autoregressive", "lookup,tree=fixed").figures("lookup", 0.0)
    assert figures.conditional_acceptance_rate, "this test needs drafts"
    assert figures.experts == ()


def test_the_document_survives_being_written(everything: ComparisonDocument) -> None:
    document = everything
    assert ComparisonDocument.model_validate_json(document.model_dump_json()) == document
    written = json.loads(document.model_dump_json())["methods"][0]
    assert written.keys() >= {"name", "tau", "speedup", "speedup_low", "speedup_high", "seconds"}
    assert written["seconds"].keys() >= {"draft", "verify", "commit", "other"}


@pytest.mark.slow
def test_deterministic_and_sampled_trees_of_a_size_are_compared(
    folder: Path, compared: Callable[..., ComparisonDocument]
) -> None:
    drafter = f"drafter={folder / 'drafter'}"
    document = compared(
        "autoregressive",
        *(
            f"{drafter},tree={tree},candidates=30,name={tree}"
            for tree in ("deterministic", "sampled")
        ),
        f"{drafter},tree=deterministic,name=small",
        num_prompts=2,
    )
    sampled = {
        (method.name, method.temperature): method.tree.sampled
        for method in document.methods
        if method.tree
    }
    assert sampled == {
        ("deterministic", 0.0): False,
        ("sampled", 0.0): False,
        ("small", 0.0): False,
        ("deterministic", 1.0): False,
        ("sampled", 1.0): True,
        ("small", 1.0): False,
    }
    nodes = {
        name: document.figures(name, 1.0).tree.max_nodes for name in ("deterministic", "small")
    }
    assert nodes == {"deterministic": 30, "small": TreeShape().num_nodes}
    assert document.figures("deterministic", 0.0).tree == document.figures("sampled", 0.0).tree


def test_transformers_is_measured_with_every_number_of_threads_that_may_be_the_fastest(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = [1, 2]
    monkeypatch.setattr("inference.benchmark.subject.contending_threads", lambda *_: numbers)
    methods = build_methods(parse_methods(["transformers"]), subject._replace(threads="auto"))
    assert [method.threads for method in methods] == numbers
    assert {method.family for method in methods} == {"transformers"}
    assert [method.name for method in methods] == [
        "transformers (threads=1)",
        "transformers (threads=2)",
    ]
    assert setting(methods[1]) == "2 threads"


def test_few_prompts_come_from_all_categories(folder: Path) -> None:
    prompts = prompts_for(_settings(folder, "autoregressive", num_prompts=3))
    assert [prompt.category for prompt in prompts] == ["code", "chat", "ids"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"keep_state": True, "repeats": 2}, "--keep-state needs --repeats 1"),
        ({"baseline": "other"}, "names a method that is not compared"),
        ({"methods": ("transformers-lookup",), "batch_size": 2}, "one prompt at a time"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    folder: Path, changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        prompts_for(_settings(folder, **({"methods": ("autoregressive",)} | changes)))


def test_a_prompt_that_leaves_no_room_is_refused_before_anything_is_decoded(
    compared: Callable[..., ComparisonDocument],
) -> None:
    with pytest.raises(PromptError, match="do not fit into the target's context"):
        compared("autoregressive", max_new_tokens=250)
