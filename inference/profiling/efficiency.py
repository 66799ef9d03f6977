"""Efficiency of decoding: the speed-up of an oracle drafter as a share of the ideal speed-up."""

from functools import partial
from statistics import median
from typing import NamedTuple

from inference.benchmark.stats import Figure, median_interval
from inference.benchmark.timing import Work, note, repeated, seconds_of
from inference.profiling.forwards import forwards_of_step
from inference.profiling.oracle import OracleDrafter
from inference.profiling.subject import ProfilingSubject
from inference.protocol import Budget
from inference.sampling.random_numbers import StepRandom

GOAL = 0.9  # smallest acceptable share
RIGHT, NODES = 3, 8  # numbers of accepted drafts and of nodes in each of the oracle's trees
ALONE = 8  # number of repetitions of the isolated forward passes, before and after each run


class OracleTiming(NamedTuple):
    """Seconds for decoding a prompt, for single forward passes, and for drafting a tree."""

    autoregressive: float  # seconds of decoding without drafts
    oracle: float  # seconds of decoding with the oracle
    tau: float
    target: float  # seconds of the target's forward pass over one token
    verify: float  # seconds of the target's forward pass over a tree
    draft: float  # seconds of drafting a tree

    @property
    def speedup(self) -> float:
        """The measured speed-up over autoregressive decoding."""
        return self.autoregressive / self.oracle

    @property
    def ideal(self) -> float:
        """The speed-up if only forward passes and drafting took time."""
        return self.tau * self.target / (self.verify + self.draft)


def measure_efficiency(subject: ProfilingSubject) -> dict[str, Figure]:
    """Return the measured speed-up with an oracle drafter as a share of the ideal speed-up."""
    timings = [_timing(subject, prompt) for prompt in [subject.prompts[0], *subject.prompts]][1:]
    efficiency = median_interval([timing.speedup / timing.ideal for timing in timings])
    details = {
        "speedup": median_interval([timing.speedup for timing in timings])._asdict(),
        "ideal": median_interval([timing.ideal for timing in timings])._asdict(),
        "tau": median(timing.tau for timing in timings),
        "milliseconds": {
            name: 1e3 * median(getattr(timing, name) for timing in timings)
            for name in ("target", "verify", "draft")
        },
    }
    note(f"oracle: {efficiency.value:.3f} of the ideal speed-up {details['ideal']}")
    return {"oracle_efficiency": Figure(efficiency, GOAL, details)}


def _timing(subject: ProfilingSubject, prompt: list[int]) -> OracleTiming:
    steps = max(2, subject.effort.new_tokens // (RIGHT + 1))
    count = steps * (RIGHT + 1) + 1
    known = subject.start(None, [prompt], count + RIGHT + 1).finish().token_ids
    spec, device = subject.target.spec, subject.target.device
    oracle = OracleDrafter([known], spec.vocab_size, device, RIGHT, NODES)
    alone, drafted = (subject.start(used, [prompt], count) for used in (None, oracle))
    works = _isolated(subject, oracle, prompt, steps)
    alone.finish()
    seconds = {name: seconds_of(repeated(work, ALONE)) / ALONE for name, work in works.items()}
    drafted.finish()
    again = {name: seconds_of(repeated(work, ALONE)) / ALONE for name, work in works.items()}
    isolated = {name: (seconds[name] + again[name]) / 2 for name in works}
    return OracleTiming(
        autoregressive=alone.seconds["total"] - alone.seconds["prefill"],
        oracle=drafted.seconds["total"] - drafted.seconds["prefill"],
        tau=drafted.stats.tau,
        **isolated,
    )


def _isolated(
    subject: ProfilingSubject, oracle: OracleDrafter, prompt: list[int], steps: int
) -> dict[str, Work]:
    """Return named functions that repeat the parts of a decoding step in the middle of a run.

    The parts are the target's forward pass over one token (`target`) and over a tree (`verify`),
    and drafting (`draft`).
    """
    count = steps * (RIGHT + 1) + 1
    middle = steps // 2
    alone, drafted = (subject.start(used, [prompt], count) for used in (None, oracle))
    session = oracle.new_session(drafted.sequences[0].request.sampling, 0)
    session.lengths = (len(prompt) + middle * (RIGHT + 1),)
    return {
        "target": forwards_of_step(subject, alone, middle * (RIGHT + 1)).replay,
        "verify": forwards_of_step(subject, drafted, middle).replay,
        "draft": partial(session.propose, Budget(NODES), StepRandom()),
    }
