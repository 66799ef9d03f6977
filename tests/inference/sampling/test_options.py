"""Two requests can be processed together if their sampling options have equal descriptions."""

import pytest
from transformers import (
    EtaLogitsWarper,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from inference.sampling.options import Sampling


def _sampling(*processors: object, do_sample: bool = True, seed: int = 0) -> Sampling:
    return Sampling(LogitsProcessorList(processors), do_sample, seed)


def test_equal_settings_have_equal_descriptions() -> None:
    one = _sampling(TemperatureLogitsWarper(0.7), EtaLogitsWarper(3e-4), seed=1)
    other = _sampling(TemperatureLogitsWarper(0.7), EtaLogitsWarper(3e-4), seed=2)
    assert one.description == other.description


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (_sampling(TopPLogitsWarper(0.9)), _sampling(TopPLogitsWarper(0.9000001))),
        (_sampling(EtaLogitsWarper(3.0e-4)), _sampling(EtaLogitsWarper(3.00001e-4))),
        (_sampling(TopKLogitsWarper(5)), _sampling(TopKLogitsWarper(5), TopPLogitsWarper(0.9))),
        (_sampling(), _sampling(do_sample=False)),
        (_sampling(), _sampling(RepetitionPenaltyLogitsProcessor(1.2))),
    ],
    ids=["top_p", "eta", "one more", "greedy", "reads the prefix"],
)
def test_settings_that_differ_in_the_least_have_other_descriptions(
    one: Sampling, other: Sampling
) -> None:
    assert one.description != other.description
