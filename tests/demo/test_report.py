"""What the demo says of its figures."""

from inference.costs import Costs
from inference.stats import DecodeStats
from inference.tree_budget import PlanChoice, Rated
from inference.tree_shape import TreeShape
from jakiro.demo.comparison import DRAFTER, PLAIN, TRANSFORMERS, Measured, Sample
from jakiro.demo.report import losses_explained, results_of

SHAPE = TreeShape(autoregressive_levels=1, parallel_levels=1, num_nodes=4)
CHOICE = PlanChoice(
    costs=Costs(verify={0: 1.0, 4: 1.5}, draft={1: 0.5}),
    greedy=Rated(shape=SHAPE, tau=2.0, speedup=1.0),
    sampling=Rated(shape=SHAPE, tau=2.0, speedup=1.0),
)


def _measured(method: str, tokens: list[int], forwards: int, seconds: float) -> Measured:
    stats = DecodeStats(emitted=len(tokens), target_forwards=forwards)
    stats.seconds["total"] = seconds
    return Measured(method, 0.0, [Sample(tokens, [0] * len(tokens), stats)])


def test_rows_compare_tokens_and_speed_with_transformers_and_with_plain_decoding() -> None:
    tokens = list(range(9))
    rows = results_of(
        [
            _measured(TRANSFORMERS, tokens, 8, 8.0),
            _measured(PLAIN, tokens, 8, 4.0),
            _measured(DRAFTER, [*tokens[:-1], 99], 4, 5.0),
        ],
        CHOICE,
    )
    drafted = rows[-1]
    assert drafted["tau"] == 2.0
    assert drafted["speedup"] == 8.0 / 5.0
    assert drafted["speedup_over_plain"] == 4.0 / 5.0
    assert drafted["identical_to_target"] is False
    assert drafted["ceiling"] == 2.0 / (1.5 + 0.5)
    assert rows[1]["identical_to_target"] is True


def test_where_plain_decoding_is_faster_the_reason_is_given() -> None:
    row = {"method": DRAFTER, "temperature": 0.0, "tau": 1.6, "speedup_over_plain": 0.8}
    (sentence,) = losses_explained([row], CHOICE)
    assert "takes at least 2.00 plain steps and won 1.60 tokens" in sentence
    assert losses_explained([row | {"speedup_over_plain": 1.2}], CHOICE) == []
