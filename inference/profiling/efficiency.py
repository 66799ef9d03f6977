"""The speed-up of a drafter that knows the answer against what its forwards alone would allow."""

from functools import partial
from statistics import median
from typing import NamedTuple

from inference.benchmark.stats import Figure, median_interval
from inference.benchmark.timing import Work, note, repeated, seconds_of
from inference.profiling.forwards import forwards_of_step
from inference.profiling.oracle import OracleDrafter
from inference.profiling.subject import Subject
from inference.protocol import Budget

GOAL = 0.9
RIGHT, NODES = 3, 8
ALONE = 8  # forwards alone for each run


class Outcome(NamedTuple):
    """One prompt: seconds of decoding, and of what it cannot do without."""

    plain: float
    oracle: float
    tau: float
    target: float  # a single token's forward
    verify: float  # a tree's forward
    draft: float

    @property
    def speedup(self) -> float:
        """Over plain decoding, as measured."""
        return self.plain / self.oracle

    @property
    def ideal(self) -> float:
        """The speed-up if nothing but the forwards and the drafting took time."""
        return self.tau * self.target / (self.verify + self.draft)


def measure_efficiency(subject: Subject) -> dict[str, Figure]:
    """Return the oracle's speed-up over plain decoding as a share of the ideal one."""
    outcomes = [_outcome(subject, prompt) for prompt in [subject.prompts[0], *subject.prompts]][1:]
    efficiency = median_interval([one.speedup / one.ideal for one in outcomes])
    details = {
        "speedup": median_interval([one.speedup for one in outcomes])._asdict(),
        "ideal": median_interval([one.ideal for one in outcomes])._asdict(),
        "tau": median(one.tau for one in outcomes),
        "milliseconds": {
            name: 1e3 * median(getattr(one, name) for one in outcomes)
            for name in ("target", "verify", "draft")
        },
    }
    note(f"oracle: {efficiency.value:.3f} of {details['ideal']}")
    return {"oracle_efficiency": Figure(efficiency, GOAL, details)}


def _outcome(subject: Subject, prompt: list[int]) -> Outcome:
    steps = max(2, subject.effort.new_tokens // (RIGHT + 1))
    count = steps * (RIGHT + 1) + 1
    known = subject.start(None, [prompt], count + RIGHT + 1).finish().token_ids
    spec, device = subject.target.spec, subject.target.device
    oracle = OracleDrafter([known], spec.vocab_size, device, RIGHT, NODES)
    plain, drafted = (subject.start(used, [prompt], count) for used in (None, oracle))
    works = _alone(subject, oracle, prompt, steps)
    plain.finish()
    seconds = {name: seconds_of(repeated(work, ALONE)) / ALONE for name, work in works.items()}
    drafted.finish()
    again = {name: seconds_of(repeated(work, ALONE)) / ALONE for name, work in works.items()}
    alone = {name: (seconds[name] + again[name]) / 2 for name in works}
    return Outcome(
        plain=plain.seconds["total"] - plain.seconds["prefill"],
        oracle=drafted.seconds["total"] - drafted.seconds["prefill"],
        tau=drafted.stats.tau,
        **alone,
    )


def _alone(
    subject: Subject, oracle: OracleDrafter, prompt: list[int], steps: int
) -> dict[str, Work]:
    """Return the forwards of a plain and of a drafted round in the middle, and the drafting."""
    count = steps * (RIGHT + 1) + 1
    middle = steps // 2
    plain, drafted = (subject.start(used, [prompt], count) for used in (None, oracle))
    session = oracle.new_session(drafted.sequences[0].request.sampling, 0)
    session.lengths = (len(prompt) + middle * (RIGHT + 1),)
    return {
        "target": forwards_of_step(subject, plain, middle * (RIGHT + 1)).replay,
        "verify": forwards_of_step(subject, drafted, middle).replay,
        "draft": partial(session.propose, Budget(NODES), []),
    }
