"""The config of a published layer: defaults of its own, and refusals of what is different."""

from typing import Any

import pytest
from helpers.published import eagle_config

from jakiro.errors import CheckpointError
from jakiro.exchange.llama_layer import layer_config


def test_values_that_are_absent_have_the_defaults_of_llama() -> None:
    config = eagle_config()
    for name in ("num_key_value_heads", "rms_norm_eps"):
        del config[name]
    read = layer_config(config, "head")
    assert (read.heads.num_kv_heads, read.heads.head_dim) == (4, 8)
    assert (read.heads.rope_theta, read.rms_norm_eps) == (10_000.0, 1e-6)


def test_both_names_of_the_rotary_base_are_read() -> None:
    parameters = {"rope_type": "default", "rope_theta": 5e5}
    assert layer_config(eagle_config(rope_parameters=parameters), "head").heads.rope_theta == 5e5
    assert layer_config(eagle_config(rope_theta=5e5), "head").heads.rope_theta == 5e5
    both = eagle_config(rope_scaling={"rope_type": "default"}, rope_parameters=parameters)
    assert layer_config(both, "head").heads.rope_theta == 5e5


@pytest.mark.parametrize("name", ["rope_theta", "rope_scaling", "rope_parameters"])
def test_a_rotary_value_may_be_null(name: str) -> None:
    read = layer_config(eagle_config(**{name: None}), "head")
    assert read.heads.rope_theta == 10_000.0
    assert read.scaling == layer_config(eagle_config(), "head").scaling


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": "four"}, "a usable num_attention_heads"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "a usable rope_theta"),
        ({"hidden_act": "gelu"}, "hidden_act silu; got: gelu"),
        ({"sliding_window": 512}, "sliding_window None; got: 512"),
        ({"rope_scaling": {"type": "odd", "factor": 2.0}}, "a usable kind.*llama3"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mscale": 1}}, "known .*got: mscale"),
        ({"num_key_value_heads": 3}, "remainder of query heads.*got: 1"),
    ],
)
def test_what_cannot_be_reproduced_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        layer_config(eagle_config(**changes), "head")
