"""All methods decode the same groups with the same seeds, and their figures are as computed."""

from collections.abc import Sequence
from typing import Any

import pytest
from helpers.models import tiny_llama
from helpers.tokenizers import tiny_tokenizer

from inference.benchmark import harness as harness_module
from inference.benchmark.document import (
    ComparisonDocument,
    Continuation,
    Decoded,
    MethodFigures,
    Sample,
)
from inference.benchmark.harness import Harness, Texts, group_prompts
from inference.benchmark.methods import SamplingOptions
from inference.benchmark.run import Comparison
from inference.benchmark.settings import ComparisonSettings
from inference.benchmark.subject import Subject
from inference.engine.stats import DecodeStats
from inference.generation.prompt_file import BenchPrompt, prompt_of
from inference.generation.prompts import Prompt

ANSWER = [7, 8, 9]
PROMPTS = [BenchPrompt([n], (), "ab"[n % 2], f"{n:08x}") for n in range(5)]
TOKENS = [prompt_of([5, 6, number]) for number in range(4)]
CHAT = BenchPrompt([{"role": "user", "content": "1"}], ("2", "3"), "chat", "c" * 8)


class Clock:
    """A clock that only the methods advance."""

    seconds = 0.0

    def now(self) -> float:
        """Return the current time in seconds."""
        return self.seconds


CLOCK = Clock()


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    CLOCK.seconds = 0.0
    monkeypatch.setattr(harness_module, "now", CLOCK.now)


class Scripted:
    """A method that delivers tokens in known portions at a known pace, until it is interrupted.

    The tokens are 7, 8, 9, 7, 8 and so on.
    """

    def __init__(
        self,
        name: str,
        portions: Sequence[int] = (3,),
        pace: float = 0.1,
        family: str | None = None,
        interrupted_at: int | None = None,
    ) -> None:
        self.name = self.kind = name
        self.family = family or name
        self.portions, self.pace = portions, pace
        self.calls: list[tuple[list[list[int]], int]] = []
        self.temperatures: list[float] = []
        self.num_resets = 0
        self.interrupted_at = interrupted_at

    def decode(self, prompts: list[list[int]], sampling: SamplingOptions, seed: int) -> Decoded:
        """Record the prompts and the seed, advance the clock, and deliver all portions."""
        if len(self.calls) == self.interrupted_at:
            raise KeyboardInterrupt
        self.calls.append((prompts, seed))
        self.temperatures.append(sampling.temperature)
        count = len(self.portions)
        CLOCK.seconds += self.pace * count
        emitted = sum(self.portions)
        stats = DecodeStats(
            from_prefill=self.portions[0], emitted=emitted, target_forwards=count - 1
        )
        answer = Continuation([7 + index % 3 for index in range(emitted)], self.pace, stats)
        return Decoded([answer] * len(prompts), {"prefill": 0.25})

    def reset(self) -> None:
        """Count the call."""
        self.num_resets += 1


def _encoded(prompt: Prompt) -> list[int]:
    """Return the numbers in a prompt: token ids, or the digits of all messages."""
    if isinstance(prompt[0], int):
        return list(prompt)
    return [int(digit) for message in prompt for digit in message["content"]]


def _decoded(token_ids: list[int]) -> str:
    return "".join(map(str, token_ids))


def _keys(samples: list[Sample]) -> set[tuple[int, int]]:
    """Return the numbers of the repeats and groups that were measured."""
    return {(sample.repeat, sample.group) for sample in samples}


def _harness(*methods: Scripted, **changes: Any) -> Harness:
    fields = {"methods": ("any",), "prompts": "prompts.jsonl", "temperatures": (0.0,), **changes}
    texts = Texts(_encoded, _decoded)
    return Harness(methods, ComparisonSettings(**fields), texts)


def test_methods_decode_the_same_groups_with_the_same_seeds() -> None:
    methods = Scripted("a"), Scripted("b")
    harness = _harness(*methods, batch_size=2, repeats=2, seed=3)
    results = harness.measure(PROMPTS)
    assert methods[0].calls == methods[1].calls
    assert [len(prompts) for prompts, _ in methods[0].calls[:2]] == [1, 2]  # groups of each size
    measured = methods[0].calls[2:]  # without the warm-up
    assert len(measured) == 2 * len(group_prompts(PROMPTS, harness.settings))
    assert len({seed for _, seed in measured}) == len(measured)
    keys = [_keys(samples) for samples in results.values()]
    assert keys[0] == keys[1] == {(repeat, group) for repeat in (0, 1) for group in range(3)}


def test_methods_are_interleaved_in_a_random_order_for_every_group() -> None:
    log: list[str] = []

    class Logged(Scripted):
        """A method that logs its name when it decodes."""

        def decode(self, *arguments: Any) -> Decoded:
            log.append(self.name)
            return super().decode(*arguments)

    _harness(Logged("a"), Logged("b"), repeats=8).measure(PROMPTS)
    pairs = {tuple(log[at : at + 2]) for at in range(4, len(log), 2)}  # without the warm-up
    assert pairs == {("a", "b"), ("b", "a")}


def test_temperatures_are_interleaved_in_a_random_order_for_every_group() -> None:
    method = Scripted("a")
    _harness(method, temperatures=(0.0, 1.0), repeats=3).measure(PROMPTS)
    measured = method.temperatures[2:]  # without the warm-up
    pairs = {tuple(measured[at : at + 2]) for at in range(0, len(measured), 2)}
    assert pairs == {(0.0, 1.0), (1.0, 0.0)}


def test_temperatures_follow_each_other_if_methods_keep_their_state() -> None:
    method = Scripted("a")
    _harness(method, temperatures=(0.0, 1.0), keep_state=True).measure(PROMPTS)
    assert method.temperatures == [0.0] * 6 + [1.0] * 6


@pytest.mark.parametrize(("keep_state", "resets"), [(False, 1 + 5), (True, 1)])
def test_methods_are_reset_after_the_warm_up_and_before_groups(
    keep_state: bool, resets: int
) -> None:
    method = Scripted("a")
    _harness(method, keep_state=keep_state).measure(PROMPTS)
    assert method.num_resets == resets


def test_a_chat_turn_includes_the_answers_before_it() -> None:
    method = Scripted("a")
    (sample,) = _harness(method).decode(method, [CHAT], SamplingOptions(0.0, 3), seed=4)
    assert method.calls == [([[1]], 4), ([[1, 7, 8, 9, 2]], 5), ([[1, 7, 8, 9, 2, 7, 8, 9, 3]], 6)]
    assert sample.token_ids == [ANSWER] * 3
    assert sample.prefill == 0.75


def test_only_prompts_with_another_chat_turn_are_decoded_again() -> None:
    method = Scripted("a")
    samples = _harness(method).decode(method, [PROMPTS[3], CHAT], SamplingOptions(0.0, 3), 0)
    assert [len(prompts) for prompts, _ in method.calls] == [2, 1, 1]
    assert [sample.turns for sample in samples] == [1, 3]


def test_after_an_interruption_only_groups_that_all_methods_decoded_are_left() -> None:
    harness = _harness(Scripted("a"), Scripted("b", interrupted_at=2 + 5), temperatures=(0.0, 1.0))
    results = harness.measure(PROMPTS)
    assert harness.is_interrupted
    keys = {name: _keys(samples) for name, samples in results.items()}
    assert len(keys) == 4
    assert len({frozenset(groups) for groups in keys.values()}) == 1
    assert len(keys["a", 0.0]) == 2


def test_an_interruption_before_any_common_group_ends_the_measurement() -> None:
    with pytest.raises(KeyboardInterrupt):
        _harness(Scripted("a"), Scripted("b", interrupted_at=1)).measure(PROMPTS)


def test_a_group_has_prompts_of_one_category() -> None:
    harness = _harness(Scripted("a"), batch_size=2)
    groups = group_prompts(PROMPTS, harness.settings)
    assert sorted(prompt.fingerprint for group in groups for prompt in group) == [
        prompt.fingerprint for prompt in PROMPTS
    ]
    assert all(len({prompt.category for prompt in group}) == 1 for group in groups)
    assert sorted(map(len, groups)) == [1, 2, 2]


def _compared(methods: Sequence[Scripted], **changes: Any) -> ComparisonDocument:
    settings = ComparisonSettings(
        methods=tuple(method.name for method in methods),
        prompts="none",
        temperatures=(1.0,),
        max_new_tokens=8,
        **changes,
    )
    subject = Subject(tiny_llama(vocab=300), tiny_tokenizer())
    return Comparison(settings, TOKENS, methods, subject, "tiny").run()


def _figures(*methods: Scripted, **changes: Any) -> list[MethodFigures]:
    return list(_compared(methods, **changes).methods)


def test_speeds_and_latencies_are_those_computed_by_hand() -> None:
    slow = Scripted("slow", [1, 1, 1, 1], pace=1.0)  # 4 tokens in 4 seconds
    fast = Scripted("fast", [2, 3, 3], pace=0.5)  # 8 tokens in 1.5 seconds
    first, second = _figures(slow, fast, repeats=2)
    assert first.tokens_per_second == pytest.approx(1.0)
    assert second.tokens_per_second == pytest.approx(8 / 1.5)
    assert second.speedup == pytest.approx(8 / 1.5)
    assert second.speedup_low == second.speedup_high == pytest.approx(second.speedup)
    assert (first.tau, second.tau) == (1.0, 3.0)  # (3 + 3) / 2, without the first portion
    assert second.seconds_to_first_token == 0.5
    assert sum(sample.prefill for sample in second.samples) == pytest.approx(0.25 * 8)
    assert second.tokens == 8 * 8


def test_prompts_decoded_together_share_their_seconds() -> None:
    one, other = (
        Scripted("slow", [1, 1, 1, 1], pace=1.0),
        Scripted("fast", [1, 3], pace=1.0),
    )
    slow, fast = _figures(one, other, batch_size=2)
    assert [sample.seconds for sample in slow.samples] == [2.0] * 4
    assert slow.tokens_per_second == pytest.approx(16 / 8)
    assert fast.speedup == pytest.approx(2.0)


def test_speedups_are_relative_to_the_fastest_setting_of_the_baseline() -> None:
    baseline = [
        Scripted(f"slow ({pace})", [1, 1], pace=pace, family="slow") for pace in (2.0, 0.5, 1.0)
    ]
    figures = _figures(*baseline, Scripted("other", [1, 1], pace=0.25))
    assert [one.name for one in figures] == ["slow (2.0)", "slow (0.5)", "slow (1.0)", "other"]
    assert [one.speedup for one in figures] == pytest.approx([0.25, 1.0, 0.5, 2.0])
