"""Figures computed from methods whose tokens, times and deliveries are known."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from helpers.models import tiny_llama
from helpers.tokenizers import tiny_tokenizer

from inference.benchmark import harness as harness_module
from inference.benchmark.document import ComparisonDocument, MethodFigures
from inference.benchmark.methods import OwnDecoding, SamplingOptions
from inference.benchmark.run import Comparison
from inference.benchmark.samples import Arrival, Continuation, Decoded
from inference.benchmark.settings import ComparisonSettings
from inference.benchmark.transformers_methods import TransformersDecoding
from inference.decoder import SpeculativeDecoder
from inference.drafters.aded.drafter import AdedDrafter
from inference.engine.stats import DecodeStats
from inference.generation.prompt_file import prompt_of
from inference.trees.shape import TreeShape

PROMPTS = [prompt_of([5, 6, number]) for number in range(4)]


class Clock:
    """A clock that only the methods advance."""

    seconds = 0.0

    def now(self) -> float:
        """Return the current time in seconds."""
        return self.seconds


class Steady:
    """A method that delivers tokens in known portions at a known pace."""

    parameters = None
    note = ""
    threads = None

    def __init__(
        self,
        name: str,
        clock: Clock,
        portions: Sequence[int],
        pace: float,
        family: str | None = None,
    ) -> None:
        self.name = self.kind = name
        self.family = family or name
        self.clock, self.portions, self.pace = clock, portions, pace
        self.seeds: list[int] = []

    def decode(self, prompts: list[list[int]], sampling: SamplingOptions, seed: int) -> Decoded:
        """Deliver all portions and advance the clock."""
        self.seeds.append(seed)
        self.clock.seconds += self.pace * len(self.portions)
        times = [self.pace * (index + 1) for index in range(len(self.portions))]
        arrivals = [Arrival(when, count) for when, count in zip(times, self.portions, strict=True)]
        stats = DecodeStats(
            from_prefill=self.portions[0],
            emitted=sum(self.portions),
            target_forwards=len(self.portions) - 1,
        )
        ids = [7] * sum(self.portions)
        return Decoded([Continuation(ids, arrivals, stats) for _ in prompts], {"prefill": 0.25})

    def reset(self) -> None:
        """Do nothing: this method learns nothing."""

    def tree(self, temperature: float) -> TreeShape | None:
        """Return None: there are no trees."""
        return None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """A clock that replaces the harness's, so that only methods take time."""
    clock = Clock()
    monkeypatch.setattr(harness_module, "now", clock.now)
    return clock


def _compared(methods: Sequence[Steady], **changes: Any) -> ComparisonDocument:
    settings = ComparisonSettings(
        methods=tuple(method.name for method in methods),
        prompts="none",
        temperatures=(1.0,),
        max_new_tokens=8,
        **changes,
    )
    tokenizer = tiny_tokenizer()
    model = tiny_llama(vocab=300)
    return Comparison(settings, PROMPTS, methods, model, tokenizer, "tiny").run()


def _figures(clock: Clock, *methods: Steady, **changes: Any) -> list[MethodFigures]:
    return list(_compared(methods, **changes).methods)


def test_speeds_and_latencies_are_those_computed_by_hand(clock: Clock) -> None:
    slow = Steady("slow", clock, [1, 1, 1, 1], pace=1.0)  # 4 tokens in 4 seconds
    fast = Steady("fast", clock, [2, 3, 3], pace=0.5)  # 8 tokens in 1.5 seconds
    first, second = _figures(clock, slow, fast, repeats=2)
    assert first.tokens_per_second == pytest.approx(1.0)
    assert second.tokens_per_second == pytest.approx(8 / 1.5)
    assert second.speedup == pytest.approx(8 / 1.5)
    assert second.speedup_low == second.speedup_high == pytest.approx(second.speedup)
    assert (first.tau, second.tau) == (1.0, 3.0)  # (3 + 3) / 2, without the first portion
    assert second.decoding_tokens_per_second == pytest.approx(6 / 1.0)
    assert second.time_to_first_token.p50 == 0.5
    assert second.inter_token.p50 == pytest.approx(0.5 / 3)
    assert second.seconds.prefill == pytest.approx(0.25 * 8)
    assert second.seconds.other == pytest.approx(1.5 * 8 - 0.25 * 8)
    assert second.tokens == 8 * 8


def test_prompts_decoded_together_share_their_seconds(clock: Clock) -> None:
    one, other = (
        Steady("slow", clock, [1, 1, 1, 1], pace=1.0),
        Steady("fast", clock, [1, 3], pace=1.0),
    )
    slow, fast = _figures(clock, one, other, batch_size=2)
    assert [sample.seconds for sample in slow.samples] == [2.0] * 4
    assert slow.tokens_per_second == pytest.approx(16 / 8)
    assert slow.decoding_tokens_per_second == pytest.approx(12 / 6)
    assert fast.speedup == pytest.approx(2.0)


def test_the_fastest_of_a_family_counts_and_the_others_are_named(clock: Clock) -> None:
    baseline = Steady("autoregressive", clock, [1, 1], pace=1.0)
    family = [
        Steady(f"lookup ({pace})", clock, [1, 1], pace=pace, family="lookup")
        for pace in (2.0, 0.5, 1.0)
    ]
    _, lookup = _figures(clock, baseline, *family)
    assert lookup.name == "lookup"
    assert lookup.speedup == pytest.approx(2.0)
    assert "1.0 tokens/s" in lookup.notes[0]


def test_methods_share_their_random_numbers_and_repeats_do_not(clock: Clock) -> None:
    one, other = (Steady(name, clock, [1, 1], pace=1.0) for name in ("a", "b"))
    _figures(clock, one, other, repeats=2)
    assert sorted(one.seeds) == sorted(other.seeds)
    assert len(set(one.seeds[1:])) == 2 * len(PROMPTS)  # the first seed is the warm-up's


class Interrupted(Steady):
    """A method that the user interrupts."""

    def decode(self, prompts: list[list[int]], sampling: SamplingOptions, seed: int) -> Decoded:
        """Deliver four times, then raise KeyboardInterrupt."""
        if len(self.seeds) == 4:
            raise KeyboardInterrupt
        return super().decode(prompts, sampling, seed)


def test_an_interruption_keeps_what_all_methods_have_decoded(clock: Clock) -> None:
    steady = Steady("autoregressive", clock, [1, 1], pace=1.0)
    document = _compared([steady, Interrupted("other", clock, [1, 2], pace=1.0)])
    assert not document.is_complete
    assert document.prompts == 3  # one of the four calls was the warm-up
    first, second = document.methods
    assert {sample.prompt for sample in first.samples} == {
        sample.prompt for sample in second.samples
    }
    assert second.speedup == pytest.approx(1.5)


def test_a_sequence_that_ends_early_in_a_batch_is_counted_without_its_padding() -> None:
    model = tiny_llama(vocab=61)
    method = TransformersDecoding("transformers", "transformers", model)
    sampling = SamplingOptions(0.0, 12)
    prompts = [[5, 6, 7], [9, 3, 2, 8, 1]]
    alone = [method.decode([prompt], sampling, 0).continuations[0].token_ids for prompt in prompts]
    end = next(token for token in alone[0] if token not in alone[1])
    unused = next(token for token in range(61) if token not in {*alone[0], *alone[1]})
    model.generation_config.eos_token_id = [unused, end]
    both = method.decode(prompts, sampling, 0).continuations
    length = alone[0].index(end) + 1
    assert [each.token_ids for each in both] == [alone[0][:length], alone[1]]
    assert [each.stats.target_forwards for each in both] == [length - 1, 11]
    assert sum(arrival.num_tokens for arrival in both[0].arrivals) == length


def test_tokens_that_prefill_delivers_are_not_decoded_tokens() -> None:
    model = tiny_llama(vocab=61)
    method = TransformersDecoding(
        "assisted", "transformers-assisted", model, assistant_model=tiny_llama(vocab=61)
    )
    (one,) = method.decode([[5, 6, 7]], SamplingOptions(0.0, 24), 0).continuations
    first = one.arrivals[0].num_tokens
    assert first > 1
    assert one.stats.decoded == 24 - first
    assert one.stats.target_forwards == len(one.arrivals) - 1


def test_resetting_our_decoding_keeps_what_is_known_about_trees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter = AdedDrafter()
    decoder = SpeculativeDecoder(tiny_llama(vocab=61), drafter)
    resets: list[str] = []
    monkeypatch.setattr(decoder.policy, "reset", lambda: resets.append("trees"))
    monkeypatch.setattr(drafter, "reset", lambda: resets.append("texts"))
    OwnDecoding("aded", "aded", decoder).reset()
    assert resets == ["texts"]
