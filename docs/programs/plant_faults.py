"""Faults that quick tests must catch: each is planted in a checkout, and its tests are run.

    python docs/programs/plant_faults.py CHECKOUT [NUMBER ...]

The checkout must be clean; every file is restored. The exit code is 1 if a fault is not caught.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

QUICK = "not slow and not faults and not browser and not gpu and not vllm"


class Fault(NamedTuple):
    """A text in a file, the wrong text in its place, and the folders of the tests."""

    name: str
    file: str
    right: str
    wrong: str
    tests: str


FAULTS = (
    Fault(
        "rank of siblings",
        "inference/trees/builder.py",
        "rank = [index % children for",
        "rank = [children - 1 - index % children for",
        "tests/inference/trees tests/inference/engine",
    ),
    Fault(
        "renormalization after a rejection, in the readable rule",
        "inference/engine/accept.py",
        "return weights / total if total > 0 else otherwise",
        "return weights",
        "tests/inference/engine",
    ),
    Fault(
        "renormalization after a rejection, in the fast rule",
        "inference/engine/siblings.py",
        "torch.where(is_sampled, rest / total, point_masses)",
        "torch.where(is_sampled, rest, point_masses)",
        "tests/inference/engine",
    ),
    Fault(
        "commit order",
        "jakiro/target/cache.py",
        "block[:, sequence, :, destination] =",
        "block[:, sequence, :, destination.flip(1)] =",
        "tests/jakiro/target tests/inference/engine",
    ),
    Fault(
        "mask of siblings",
        "jakiro/target/step.py",
        "(parents.unsqueeze(-1) == nodes)",
        "(parents.unsqueeze(-1) == nodes) | (parents.unsqueeze(-1) == parents.unsqueeze(1))",
        "tests/jakiro/target tests/inference/engine",
    ),
    Fault(
        "position of parallel levels",
        "jakiro/levels.py",
        "torch.cat((positions, (positions[:, :, None] + ahead).flatten(1)), dim=1),",
        "torch.cat((positions, (positions[:, :, None] + ahead - 1).flatten(1)), dim=1),",
        "tests/jakiro/test_levels.py tests/inference/drafters/trained",
    ),
    Fault(
        "router weight of a component",
        "jakiro/experts.py",
        " + log_weights.float().unsqueeze(-1)",
        " + 0 * log_weights.float().unsqueeze(-1)",
        "tests/jakiro/test_experts.py tests/inference/drafters/trained tests/training/loss",
    ),
    Fault(
        "seed of a sequence",
        "inference/sampling/options.py",
        "return (self.seed, self.batch_index, self.request_index, step_id)",
        "return (self.seed, 0, self.request_index, step_id)",
        "tests/inference/sampling tests/inference/engine",
    ),
    Fault(
        "draft-id offset",
        "jakiro/exchange/eagle3.py",
        "ids = torch.arange(count) + table",
        "ids = torch.arange(count) + 1 + table",
        "tests/jakiro/exchange",
    ),
    Fault(
        "boundary of a response span",
        "training/data/rendering.py",
        "self.added = Span(len(self.asked), end)",
        "self.added = Span(len(self.asked) + 1, end)",
        "tests/training/data",
    ),
    Fault(
        "anchor off by one",
        "training/loss/anchors.py",
        "np.arange(count) - distance)",
        "np.arange(count) - distance + 1)",
        "tests/training/loss",
    ),
    Fault(
        "gradient accumulation",
        "training/loop/trainer.py",
        "self._processes.count * self._accumulation /",
        "self._processes.count /",
        "tests/training/loop tests/training/test_train.py",
    ),
    Fault(
        "a lost reply decided twice",
        "inference/remote/text_state.py",
        "return self.last.body",
        "self.next_step = step",
        "tests/inference/remote tests/inference/serving/test_sessions.py",
    ),
    Fault(
        "an option of the command line without effect",
        "jakiro/cli/options.py",
        "values = {name: given.pop(name) for name in fields}",
        "values = {name: given.pop(name) and fields[name].default for name in fields}",
        "tests/jakiro/cli",
    ),
    Fault(
        "the key of another user",
        "inference/serving/access.py",
        "return users[0] if users",
        "return next(iter(self._hashes)) if users",
        "tests/inference/serving",
    ),
)


def catching_test(checkout: Path, fault: Fault) -> str | None:
    """Plant a fault, and return the first quick test that fails; None if all pass."""
    path = checkout / fault.file
    text = path.read_text()
    assert fault.right in text, f"{fault.file} has changed: {fault.right}"
    path.write_text(text.replace(fault.right, fault.wrong))
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", QUICK, *fault.tests.split()]
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        run = subprocess.run(
            command, cwd=checkout, env=environment, capture_output=True, text=True, check=False
        )
    finally:
        path.write_text(text)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.MULTILINE)
    return failed[0] if failed else None


def main() -> int:
    """Plant the faults with the given numbers, or all."""
    checkout, numbers = Path(sys.argv[1]).absolute(), {int(word) for word in sys.argv[2:]}
    missed = 0
    for number, fault in enumerate(FAULTS, start=1):
        if numbers and number not in numbers:
            continue
        caught = catching_test(checkout, fault)
        missed += caught is None
        sys.stdout.write(f"{number} {fault.name}: {caught or 'NOT CAUGHT'}\n")
        sys.stdout.flush()
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
