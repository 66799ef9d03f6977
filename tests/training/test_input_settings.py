"""Settings of a run's inputs."""

import pytest

from jakiro.utils.settings import Settings, validate_settings
from training.config import EngineSettings
from training.input_settings import TargetSettings, TargetStateSettings


@pytest.mark.parametrize(
    ("kind", "others"),
    [(TargetSettings, {"name_or_path": "x"}), (EngineSettings, {}), (TargetStateSettings, {})],
)
@pytest.mark.parametrize(("short", "long"), [("bf16", "bfloat16"), ("fp32", "float32")])
def test_both_names_of_a_dtype_are_the_same_setting(
    kind: type[Settings], others: dict[str, str], short: str, long: str
) -> None:
    expected = validate_settings(kind, others | {"dtype": short}, source="the test")
    assert validate_settings(kind, others | {"dtype": long}, source="the test") == expected
