"""A comparison measures all methods in the same way, and its figures add up."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.mixed_prompts import RECORDS, write_target_and_prompts
from helpers.models import tiny_drafter

from inference.benchmark.document import ComparisonDocument
from inference.benchmark.run import compare, prompts_for
from inference.benchmark.settings import ComparisonSettings, parse_methods
from inference.benchmark.subject import Subject, build_methods
from inference.trees.shape import TreeShape
from jakiro.errors import ConfigError, PromptError
from jakiro.utils.pretrained import load_target

NEW_TOKENS = 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, a drafter and a file of prompts."""
    path = tmp_path_factory.mktemp("comparison")
    tiny_drafter(write_target_and_prompts(path)).save_pretrained(path / "drafter")
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
        return compare(settings, prompts_for(settings), subject, "tiny")

    return run


@pytest.fixture(scope="module")
def everything(folder: Path, compared: Callable[..., ComparisonDocument]) -> ComparisonDocument:
    """The results of all methods on all prompts."""
    return compared(
        "transformers",
        "transformers-lookup",
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
    assert other.identical_share == 1
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
    assert len(document.methods) == 4 * 2
    for method in document.methods:
        assert method.identical_share == (None if method.temperature else 1)
        assert {sample.prompt for sample in method.samples} == {
            sample.prompt for sample in document.methods[0].samples
        }
        assert len(method.samples) == len(RECORDS)
        assert sum(sample.turns for sample in method.samples) == len(RECORDS) + 1
        assert method.tokens == sum(sample.tokens for sample in method.samples)
        assert method.speedup_low <= method.speedup <= method.speedup_high
        assert method.seconds_to_first_token > 0
    alone = document.figures("autoregressive", 0.0)
    assert alone.tau == 1.0
    assert alone.tokens == (len(RECORDS) + 1) * NEW_TOKENS
    assert document.figures("transformers", 1.0).speedup == 1.0


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
        assert method.identical_share == 1
        assert method.tokens == (len(RECORDS) + 1) * NEW_TOKENS
        assert {sample.group for sample in method.samples} == {0, 1, 2}


def test_the_document_survives_being_written(everything: ComparisonDocument) -> None:
    text = everything.model_dump_json()
    assert ComparisonDocument.model_validate_json(text).model_dump_json() == text


def test_deterministic_and_fixed_trees_of_a_size_are_built(folder: Path, subject: Subject) -> None:
    drafter = f"drafter={folder / 'drafter'}"
    fixed, best, small = build_methods(
        parse_methods(
            [
                f"{drafter},tree=fixed,candidates=30,name=fixed",
                f"{drafter},tree=deterministic,candidates=30,name=best",
                f"{drafter},tree=deterministic,name=small",
            ]
        ),
        subject,
    )
    plans = [method.decoder.drafter.plan for method in (fixed, best, small)]  # type: ignore[attr-defined]
    assert [plan.sampling.sampled for plan in plans] == [True, False, False]
    assert plans[0].greedy == plans[1].greedy == plans[1].sampling
    assert plans[1].greedy.max_nodes == 30
    assert plans[2].greedy.max_nodes == TreeShape().num_nodes


def test_transformers_is_measured_with_every_number_of_threads_that_may_be_the_fastest(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = [1, 2]
    monkeypatch.setattr("inference.benchmark.subject.contending_threads", lambda *_: numbers)
    methods = build_methods(parse_methods(["transformers"]), subject._replace(threads="auto"))
    assert {method.family for method in methods} == {"transformers"}
    assert [method.name for method in methods] == [
        "transformers (1 thread)",
        "transformers (2 threads)",
    ]


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
