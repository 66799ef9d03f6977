"""The findings name every method, and claim no difference that the intervals do not show."""

import re
from random import Random

import pytest
from helpers.comparisons import make_document, with_figures

from inference.benchmark.document import ComparisonDocument
from inference.benchmark.report.style import looks
from inference.benchmark.report.verdict import step_cost, verdict


def measured(
    speeds: dict[str, tuple[float, float, float]], prompts: int = 8, noise: float = 0.0
) -> ComparisonDocument:
    """Return a document of methods with these speed-ups over `autoregressive`.

    Args:
        speeds: speed-up and both ends of its interval, for each method.
        prompts: number of prompts; the baseline's speeds on them are independent of the others'.
        noise: seconds added to every other prompt, odd or even ones depending on the method,
            before the division by the speed-up.
    """
    document = make_document(("autoregressive", *speeds), prompts=prompts)
    for index, (speedup, low, high) in enumerate(speeds.values(), start=1):
        samples = tuple(
            one.model_copy(
                update={"seconds": (1 + noise * ((at + index) % 2) + at) / speedup, "tokens": 100}
            )
            for at, one in enumerate(document.methods[index].samples)
        )
        figures = {"speedup": speedup, "speedup_low": low, "speedup_high": high}
        document = with_figures(document, index, samples=samples, **figures)
    return document


def said_of(document: ComparisonDocument) -> str:
    return verdict(document, 0.0, looks(document)).striptags()


def test_verdict_gives_the_speed_up_with_its_interval():
    said = said_of(measured({"drafter=a": (2.0, 1.8, 2.2)}))
    assert said.startswith(
        "Speed-ups are relative to autoregressive, with 95% intervals. "
        "Faster: drafter=a 2.00 [1.80, 2.20]."
    )
    assert said.endswith("Identical to the target's own greedy tokens: all methods.")
    assert "fastest" not in said


def test_verdict_decides_a_lead_by_the_prompts_that_both_decoded():
    """Intervals of methods with a common baseline may overlap although one method leads."""
    speeds = {"drafter=a": (2.0, 1.8, 2.2), "drafter=b": (1.9, 1.7, 2.1)}
    said = said_of(measured(speeds))
    assert "Faster: drafter=a 2.00 [1.80, 2.20] and drafter=b 1.90 [1.70, 2.10]." in said
    assert "drafter=a is the fastest: 1.05 [1.05, 1.05] times the speed of drafter=b." in said
    said = said_of(measured(speeds, noise=2.0))
    assert "drafter=a is not shown to be faster than drafter=b." in said
    assert "fastest" not in said


def test_verdict_names_the_resolved_method_though_another_may_be_faster():
    said = said_of(measured({"drafter=a": (1.3, 0.8, 1.9), "drafter=b": (1.25, 1.2, 1.3)}))
    assert "Faster: drafter=b 1.25 [1.20, 1.30]." in said
    assert "Not distinguishable: drafter=a 1.30 [0.80, 1.90]." in said
    assert "drafter=b is not shown to be faster than drafter=a." in said


def test_verdict_calls_a_method_slower_only_if_that_is_shown():
    said = said_of(measured({"drafter=a": (0.95, 0.92, 0.98), "drafter=b": (0.93, 0.7, 1.3)}))
    assert "Faster" not in said
    assert "Slower: drafter=a 0.95 [0.92, 0.98]." in said
    assert "Not distinguishable: drafter=b 0.93 [0.70, 1.30]." in said


def test_verdict_of_too_few_prompts_says_nothing_about_noise():
    speeds = {"drafter=a": (2.0, 1.8, 2.2), "drafter=b": (0.5, 0.4, 0.6)}
    said = said_of(measured(speeds, prompts=4))
    without = "over autoregressive, without intervals: drafter=a 2.00 and drafter=b 0.50."
    assert f"Speed-ups {without}" in said
    assert "95%" not in said
    assert "fastest" not in said
    assert "Slower" not in said
    document = measured(speeds, prompts=8)
    for index, one in enumerate(document.methods):
        samples = [each.model_copy(update={"group": each.group // 4}) for each in one.samples]
        document = with_figures(document, index, samples=tuple(samples))
    assert without in said_of(document)  # two groups of prompts that are decoded together


def test_verdict_gives_the_duration_and_the_tokens_of_drafting_steps():
    document = make_document(("autoregressive", "drafter=a", "drafter=b"))
    steps = {}
    for name in ("drafter=a", "drafter=b"):
        method = document.figures(name, 0.0)
        cost = step_cost(method, document.methods)
        assert cost is not None
        steps[method.speedup] = (name, f"{cost:.2f}", f"{method.tau:.2f}")
    first, second = (steps[speedup] for speedup in sorted(steps, reverse=True))
    assert (
        f"A decoding step of {first[0]} takes {first[1]} times as long as one of autoregressive "
        f"decoding, and emits {first[2]} tokens; one of {second[0]} takes {second[1]} times as "
        f"long and emits {second[2]} tokens."
    ) in said_of(document)
    without = make_document(("transformers", "drafter=a"))
    assert "decoding step" not in said_of(without)


@pytest.mark.parametrize("seed", range(40))
def test_verdict_names_every_method_and_contradicts_no_interval(seed):
    randomness = Random(seed)
    speeds = {}
    for name in ("drafter=a", "drafter=b", "drafter=c", "other"):
        low, middle, high = sorted(randomness.uniform(0.6, 1.6) for _ in range(3))
        speeds[name] = (middle, low, high)
    document = measured(speeds, noise=randomness.choice((0.0, 2.0)))
    said = said_of(document)
    found = {
        kind: {name for name in speeds if name in "".join(re.findall(pattern, said))}
        for kind, pattern in {
            "faster": r"Faster: .*?\]\.",
            "slower": r"Slower: .*?\]\.",
            "open": r"distinguishable: .*?\]\.",
        }.items()
    }
    assert found == {
        "faster": {name for name, (_, low, _) in speeds.items() if low > 1},
        "slower": {name for name, (_, _, high) in speeds.items() if high < 1},
        "open": {name for name, (_, low, high) in speeds.items() if low <= 1 <= high},
    }


def test_verdict_shows_the_share_of_identical_samples():
    document = make_document(("autoregressive", "drafter=mine", "drafter=b"))
    document = with_figures(document, 1, identical_to_target=False, identical_share=0.75)
    document = with_figures(document, 2, identical_to_target=False, identical_share=0.75)
    said = said_of(document)
    assert "greedy tokens: drafter=mine 75% and drafter=b 75%." in said
    unknown = with_figures(make_document(), 1, identical_to_target=None, identical_share=None)
    assert said_of(unknown).endswith(" greedy tokens: autoregressive.")
