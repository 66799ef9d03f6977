"""Names of drafters, and their parts."""

from inference.drafters.names import PairName, UntrainedName


def test_a_name_has_up_to_two_drafters() -> None:
    assert UntrainedName.parse("aded=table") == UntrainedName("aded", "table")
    assert UntrainedName.parse("drafter") is UntrainedName.parse("drafter=aded") is None
    assert PairName.parse("aded=a+lm=b") == PairName("aded=a", "lm=b")
    assert PairName.parse("lookup") is None
