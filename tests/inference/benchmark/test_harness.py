"""All methods decode the same groups with the same seeds, even if they are interrupted."""

from typing import Any

import pytest
import torch

from inference.benchmark.harness import Harness, Texts, grouped
from inference.benchmark.methods import SamplingOptions
from inference.benchmark.samples import Arrival, Continuation, Decoded, Measured
from inference.benchmark.settings import ComparisonSettings
from inference.engine.stats import DecodeStats
from inference.generation.prompt_file import BenchPrompt
from inference.generation.prompts import Prompt
from inference.trees.shape import TreeShape

ANSWER = [7, 8, 9]
PROMPTS = [BenchPrompt([n], (), "ab"[n % 2], f"{n:08x}") for n in range(5)]
CHAT = BenchPrompt([{"role": "user", "content": "1"}], ("2", "3"), "chat", "c" * 8)


class Scripted:
    """A method that always gives the same answer and can be interrupted at a given call."""

    def __init__(self, name: str, interrupted_at: int | None = None) -> None:
        self.name = self.family = self.kind = name
        self.note = ""
        self.threads = None
        self.parameters = None
        self.calls: list[tuple[list[list[int]], int]] = []
        self.temperatures: list[float] = []
        self.num_resets = 0
        self.interrupted_at = interrupted_at

    def decode(self, prompts: list[list[int]], sampling: SamplingOptions, seed: int) -> Decoded:
        """Record the prompts and the seed, and give the answer."""
        if len(self.calls) == self.interrupted_at:
            raise KeyboardInterrupt
        self.calls.append((prompts, seed))
        self.temperatures.append(sampling.temperature)
        stats = DecodeStats(emitted=len(ANSWER), target_forwards=2)
        answer = Continuation(ANSWER, [Arrival(0.1, len(ANSWER))], stats)
        return Decoded([answer] * len(prompts), {"verify": 0.5})

    def reset(self) -> None:
        """Count the call."""
        self.num_resets += 1

    def tree(self, temperature: float) -> TreeShape | None:
        """Return None: there are no trees."""
        return None


def _encoded(prompt: Prompt) -> list[int]:
    """Return the numbers in a prompt: token ids, or the digits of all messages."""
    if isinstance(prompt[0], int):
        return list(prompt)
    return [int(digit) for message in prompt for digit in message["content"]]


def _decoded(token_ids: list[int]) -> str:
    return "".join(map(str, token_ids))


def _keys(measured: Measured) -> set[tuple[int, int]]:
    """Return the numbers of the repeats and groups that were measured."""
    return {(sample.repeat, sample.group) for sample in measured.samples}


def _harness(*methods: Scripted, longest_prompt: int = 99, **changes: Any) -> Harness:
    fields = {"methods": ("any",), "prompts": "prompts.jsonl", "temperatures": (0.0,), **changes}
    texts = Texts(_encoded, _decoded, longest_prompt)
    return Harness(methods, ComparisonSettings(**fields), texts, torch.device("cpu"))


def test_methods_decode_the_same_groups_with_the_same_seeds() -> None:
    methods = Scripted("a"), Scripted("b")
    harness = _harness(*methods, batch_size=2, repeats=2, seed=3)
    results = harness.measure(PROMPTS)
    assert methods[0].calls == methods[1].calls
    assert [len(prompts) for prompts, _ in methods[0].calls[:2]] == [1, 2]  # groups of each size
    measured = methods[0].calls[2:]  # without the warm-up
    assert len(measured) == 2 * len(grouped(PROMPTS, harness.settings))
    assert len({seed for _, seed in measured}) == len(measured)
    keys = [_keys(found) for found in results.values()]
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
    measured = _harness(method).decode(method, [CHAT], SamplingOptions(0.0, 3), seed=4)
    assert method.calls == [([[1]], 4), ([[1, 7, 8, 9, 2]], 5), ([[1, 7, 8, 9, 2, 7, 8, 9, 3]], 6)]
    assert measured.samples[0].token_ids == [ANSWER] * 3
    assert measured.parts == {"verify": 1.5}


def test_only_prompts_with_another_chat_turn_are_decoded_again() -> None:
    method = Scripted("a")
    measured = _harness(method).decode(method, [PROMPTS[3], CHAT], SamplingOptions(0.0, 3), 0)
    assert [len(prompts) for prompts, _ in method.calls] == [2, 1, 1]
    assert [sample.turns for sample in measured.samples] == [1, 3]


def test_an_answer_that_leaves_no_room_for_the_next_is_cut_at_its_end() -> None:
    method = Scripted("a")
    harness = _harness(method, longest_prompt=7)
    harness.decode(method, [CHAT], SamplingOptions(0.0, 3), 0)
    assert [prompts[0] for prompts, _ in method.calls] == [
        *([1], [1, 7, 8, 9, 2]),
        [1, 7, 8, 9, 2, 7, 3],
    ]


def test_after_an_interruption_only_groups_that_all_methods_decoded_are_left() -> None:
    harness = _harness(Scripted("a"), Scripted("b", interrupted_at=2 + 5), temperatures=(0.0, 1.0))
    results = harness.measure(PROMPTS)
    assert harness.is_interrupted
    keys = {name: _keys(found) for name, found in results.items()}
    assert len(keys) == 4
    assert len({frozenset(groups) for groups in keys.values()}) == 1
    assert len(keys["a", 0.0]) == 2


def test_after_an_interruption_a_temperature_without_common_groups_is_left_out() -> None:
    interrupted = Scripted("b", interrupted_at=1 + 3)
    changes = {"temperatures": (0.0, 1.0), "keep_state": True}
    results = _harness(Scripted("a"), interrupted, **changes).measure(PROMPTS)
    assert results.keys() == {("a", 0.0), ("b", 0.0)}


def test_an_interruption_before_any_common_group_ends_the_measurement() -> None:
    with pytest.raises(KeyboardInterrupt):
        _harness(Scripted("a"), Scripted("b", interrupted_at=1)).measure(PROMPTS)


def test_a_group_has_prompts_of_one_category() -> None:
    harness = _harness(Scripted("a"), batch_size=2)
    groups = grouped(PROMPTS, harness.settings)
    assert sorted(prompt.fingerprint for group in groups for prompt in group) == [
        prompt.fingerprint for prompt in PROMPTS
    ]
    assert all(len({prompt.category for prompt in group}) == 1 for group in groups)
    assert sorted(map(len, groups)) == [1, 2, 2]
