"""The demo's table of figures, and its explanation of slowdowns."""

import shlex
from io import StringIO

from helpers.comparisons import make_document
from rich.console import Console

from inference.autotune.costs import Costs
from inference.autotune.search import PlanChoice, Rated
from inference.benchmark.method_names import AUTOREGRESSIVE, TRANSFORMERS
from inference.trees.shape import TreeShape
from jakiro.demo.report import JAKIRO, explain_slowdowns, results_of, show_next

SHAPE = TreeShape(autoregressive_levels=1, parallel_levels=1, num_nodes=4)
CHOICE = PlanChoice(
    costs=Costs(verify={0: 1.0, 4: 1.5}, draft={1: 0.5}),
    greedy=Rated(shape=SHAPE, tau=2.0, speedup=1.0),
    sampling=Rated(shape=SHAPE, tau=2.0, speedup=1.0),
)


def test_rows_compare_speed_with_transformers_and_with_autoregressive_decoding() -> None:
    document = make_document(methods=(TRANSFORMERS, AUTOREGRESSIVE, JAKIRO))
    rows = {row["method"]: row for row in results_of(document, CHOICE)}
    own = document.figures(JAKIRO, 0.0)
    baseline = document.figures(AUTOREGRESSIVE, 0.0)
    assert rows[JAKIRO]["tau"] == own.tau
    assert rows[JAKIRO]["speedup"] == own.speedup
    expected = own.tokens_per_second / baseline.tokens_per_second
    assert rows[JAKIRO]["speedup_over_autoregressive"] == expected
    assert rows[JAKIRO]["ceiling"] == own.tau / (1.5 + 0.5)
    assert rows[AUTOREGRESSIVE]["ceiling"] == 1.0
    assert rows[TRANSFORMERS]["ceiling"] is None


def test_a_slowdown_against_autoregressive_decoding_is_explained() -> None:
    row = {"method": JAKIRO, "temperature": 0.0, "tau": 1.6, "speedup_over_autoregressive": 0.8}
    (sentence,) = explain_slowdowns([row], CHOICE)
    assert "at least as long as 2.00 autoregressive steps and yields only 1.60 tokens" in sentence
    assert explain_slowdowns([row | {"speedup_over_autoregressive": 1.2}], CHOICE) == []


def test_the_commands_at_the_end_can_be_pasted_into_a_shell() -> None:
    stream = StringIO()
    show_next(Console(file=stream, width=40), "/my cache/drafter", "my target")
    drafter, *commands = stream.getvalue().splitlines()
    assert drafter == "Drafter: /my cache/drafter"
    generate, bench = map(shlex.split, commands)
    assert generate == ["jakiro", "generate", "/my cache/drafter", "def main("]
    assert bench[:4] == ["jakiro", "bench", "--target", "my target"]
    assert "drafter=/my cache/drafter" in bench
