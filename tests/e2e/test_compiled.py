"""Compiled steps give the same tokens; they run in a separate process without type checks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="needs a C++ compiler"),
]

# Marks all buffers as on a GPU, where compiled code must not set marks, and compiles quickly.
MARKS = """
import functools
import torch
import inference.drafters.trained.kv as kv
import jakiro.target.cache as cache

def always(buffer):
    torch._dynamo.mark_static_address(buffer, guard=False)
    return buffer

cache.in_place = kv.in_place = always
torch.compile = functools.partial(torch.compile, backend="eager")
"""

PROGRAM = """
import sys

from helpers.models import tiny_drafter, tiny_llama
from helpers.variants import VARIANTS
from inference import SpeculativeDecoder
from inference.drafters.trained.drafter import TrainedDrafter
from inference.trees.shape import TreeShape
from jakiro.target.adapter import TargetAdapter

model = tiny_llama(vocab=11, num_hidden_layers=3)
settings = VARIANTS[sys.argv[1]]
drafter = tiny_drafter(TargetAdapter(model), settings)
parallel = settings.schedule.parallel_levels
levels = {"autoregressive_levels": 2, "parallel_levels": parallel}
tree = TreeShape(**levels, children=2, breadth=2, num_nodes=6)
plain = SpeculativeDecoder(
    model, TrainedDrafter(drafter, TargetAdapter(model), tree), tree="fixed"
)
expected = [plain.generate([1, 2, n], max_new_tokens=75, temperature=0.0) for n in range(3)]
sampled = plain.generate([1, 2], max_new_tokens=30, temperature=1.0, seed=1)
assert sum(one.stats.accepted.total() for one in expected) > 0

compiled = SpeculativeDecoder(model, drafter, tree=tree, compiled=True)
got = [compiled.generate([1, 2, n], max_new_tokens=75, temperature=0.0) for n in range(3)]
assert [one.new_token_ids for one in got] == [one.new_token_ids for one in expected]
again = compiled.generate([1, 2], max_new_tokens=30, temperature=1.0, seed=1)
assert again.new_token_ids == sampled.new_token_ids

import torch._dynamo.utils
assert compiled.target.is_compiled
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 2
assert not torch._dynamo.utils.counters["graph_break"], torch._dynamo.utils.counters["graph_break"]
"""


@pytest.mark.parametrize("name", ["E2-mixture-P1", "feedback-mixture-P2", "tail-1"])
def test_compiled_steps_give_the_same_tokens(name: str) -> None:
    _run(PROGRAM, name)


def test_compiled_steps_do_not_mark_buffers_themselves() -> None:
    _run(MARKS + PROGRAM, "E2-mixture-P1")


def _run(program: str, name: str) -> None:
    """Run a program for a variant of the drafter, and check that it succeeds."""
    environment = {
        **os.environ,
        "JAKIRO_RUNTIME_TYPECHECK": "0",
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
    }
    finished = subprocess.run(
        [sys.executable, "-c", program, name],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
