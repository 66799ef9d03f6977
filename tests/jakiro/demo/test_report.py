"""What the demo says of its figures."""

from helpers.comparisons import make_document

from inference.autotune.costs import Costs
from inference.autotune.search import PlanChoice, Rated
from inference.benchmark.method_names import AUTOREGRESSIVE, TRANSFORMERS
from inference.trees.shape import TreeShape
from jakiro.demo.report import JAKIRO, losses_explained, results_of

SHAPE = TreeShape(autoregressive_levels=1, parallel_levels=1, num_nodes=4)
CHOICE = PlanChoice(
    costs=Costs(verify={0: 1.0, 4: 1.5}, draft={1: 0.5}),
    greedy=Rated(shape=SHAPE, tau=2.0, speedup=1.0),
    sampling=Rated(shape=SHAPE, tau=2.0, speedup=1.0),
)


def test_rows_compare_speed_with_transformers_and_with_plain_decoding() -> None:
    document = make_document(methods=(TRANSFORMERS, AUTOREGRESSIVE, JAKIRO))
    rows = {row["method"]: row for row in results_of(document, CHOICE)}
    own = document.figures(JAKIRO, 0.0)
    plain = document.figures(AUTOREGRESSIVE, 0.0)
    assert rows[JAKIRO]["tau"] == own.tau
    assert rows[JAKIRO]["speedup"] == own.speedup
    assert rows[JAKIRO]["speedup_over_plain"] == own.tokens_per_second / plain.tokens_per_second
    assert rows[JAKIRO]["ceiling"] == own.tau / (1.5 + 0.5)
    assert rows[AUTOREGRESSIVE]["ceiling"] == 1.0
    assert rows[TRANSFORMERS]["ceiling"] is None


def test_where_plain_decoding_is_faster_the_reason_is_given() -> None:
    row = {"method": JAKIRO, "temperature": 0.0, "tau": 1.6, "speedup_over_plain": 0.8}
    (sentence,) = losses_explained([row], CHOICE)
    assert "takes at least 2.00 plain steps and won 1.60 tokens" in sentence
    assert losses_explained([row | {"speedup_over_plain": 1.2}], CHOICE) == []
