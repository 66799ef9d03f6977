"""Profiles the decoding engine: `python -m inference.profiling.engine --target PATH`.

It prints progress to standard error and, as its last line, a JSON document to standard output.
"""

import argparse
import sys
from collections.abc import Callable, Sequence

from inference.benchmark.machine import emit, environment
from inference.benchmark.stats import Figure
from inference.profiling.efficiency import measure_efficiency
from inference.profiling.forwards import measure_growth
from inference.profiling.overhead import measure_overhead
from inference.profiling.runs import measure_autoregressive, measure_batches
from inference.profiling.subject import Effort, Subject, add_target_options, build_subject

QUICK = Effort(prompts=2, new_tokens=9, repeats=3)
MEASUREMENTS: dict[str, Callable[[Subject], dict[str, Figure]]] = {
    "autoregressive": measure_autoregressive,
    "overhead": measure_overhead,
    "growth": measure_growth,
    "batches": measure_batches,
    "oracle": measure_efficiency,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurements and print the document."""
    options = _parse(arguments)
    effort = Effort(options.prompts, options.new_tokens, options.repeats)
    subject = build_subject(options, QUICK if options.quick else effort)
    figures: dict[str, Figure] = {}
    for name in options.only or MEASUREMENTS:
        figures |= MEASUREMENTS[name](subject)
    emit(
        {name: figure.headline() for name, figure in figures.items()}
        | {
            "details": {name: dict(figure.details) for name, figure in figures.items()},
            "environment": environment(subject.target, options)
            | {"drafter_parameters": subject.drafter.num_parameters()},
        }
    )
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the decode engine.")
    add_target_options(parser)
    parser.add_argument("--drafter", help="folder; by default a random drafter of about one layer")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--new-tokens", type=int, default=97)
    parser.add_argument("--repeats", type=int, default=24, help="repeats of single decoding steps")
    parser.add_argument(
        "--only", nargs="+", choices=list(MEASUREMENTS), help="run only these measurements"
    )
    parser.add_argument("--quick", action="store_true", help="a run of a few seconds, as a test")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
