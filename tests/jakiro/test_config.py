"""Target states that a drafter cannot read are refused with what it could read."""

import pytest
from helpers.models import tiny_llama

from jakiro.config import (
    check_complete,
    check_rotation,
    check_source,
    check_widths,
    unusable,
)
from jakiro.errors import ConfigError
from jakiro.target.adapter import TargetAdapter
from jakiro.target.cache import StateSource
from jakiro.target.record import TargetRecord, record_target


@pytest.fixture(scope="module")
def record() -> TargetRecord:
    """The record of a target with three layers."""
    return record_target(TargetAdapter(tiny_llama()).spec, "tiny")


@pytest.mark.parametrize(
    ("kind", "layers", "last"),
    [("kv", (0, 3), 2), ("kv", (), 2), ("hidden", (4,), 3), ("hidden", (-1, 2), 3)],
)
def test_layers_that_the_target_does_not_have(
    kind: str, layers: tuple[int, ...], last: int, record: TargetRecord
) -> None:
    check_source("memory.layers", StateSource(kind, (last, 0)), record)
    with pytest.raises(ConfigError, match=rf"drafter\.memory\.layers.*from 0 to {last}"):
        check_source("memory.layers", StateSource(kind, layers), record)


def test_layers_of_different_widths() -> None:
    check_widths([32, 32])
    with pytest.raises(ConfigError, match=r"got: \[16, 32\]; remedy: set drafter.memory.common_w"):
        check_widths([32, 16, 32])


def test_an_unknown_rotation(record: TargetRecord) -> None:
    check_rotation(record)
    with pytest.raises(ConfigError, match=r"rotates whole keys.*drafter\.memory\.rotated=true"):
        check_rotation(record.model_copy(update={"key_rotation": None}))


def test_an_incomplete_record_of_a_target(record: TargetRecord) -> None:
    check_complete(record.model_dump())
    with pytest.raises(ConfigError, match="a record with the fields hidden_size"):
        check_complete(record.model_dump(exclude={"hidden_size"}))


def test_content_of_a_config_that_is_missing_or_of_another_type() -> None:
    assert "got: none" in str(unusable("no settings", "an object", type(None)))
    assert "got: list" in str(unusable("no settings", "an object", list))
