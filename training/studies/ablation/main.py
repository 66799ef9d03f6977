"""Ablation study in one command: train all arms, measure them together, and compare them.

`python -m training.studies.ablation.main --base FILE --config FILE ... --out DIR`
"""

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jakiro.errors import JakiroError
from jakiro.utils.settings import validate_settings
from training.data.report import report_once
from training.studies.ablation.settings import StudySettings
from training.studies.ablation.study import Study

EXIT_CODE_BAD_INPUT = 2
EXIT_CODE_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study of a command line; return 0 when done, 2 on bad input."""
    options = parse(arguments)
    try:
        with report_once():
            _work(options)
    except JakiroError as error:
        if options.debug:
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)  # noqa: T201
        return EXIT_CODE_BAD_INPUT
    except KeyboardInterrupt:
        again = "interrupted; the same command continues where it stopped"
        print(again + (", without --rerun" if options.rerun else ""), file=sys.stderr)  # noqa: T201
        return EXIT_CODE_INTERRUPTED
    return 0


def _work(options: Any) -> None:
    study = Study(_settings(options))
    if options.dry_run:
        study.estimate()
    elif options.train_only:
        study.train(options.train_only, rerun=options.rerun)
    else:
        study.complete(rerun=options.rerun)


def _settings(options: Any) -> StudySettings:
    values = {name: getattr(options, name) for name in StudySettings.model_fields}
    return validate_settings(StudySettings, values, source="the command line")


def parse(arguments: Sequence[str] | None) -> Any:
    """Return the options of a command line."""
    parser = ArgumentParser(
        prog="training.studies.ablation.main", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--base", type=Path, required=True, help="settings of a training run")
    parser.add_argument(
        "--config",
        type=Path,
        nargs="+",
        action="extend",
        required=True,
        help="ablations, as deltas on the base",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of runs and results")
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="KEY.PATH=VALUE",
        action="append",
        default=[],
        help="change a setting of the base, and so of every arm; may be repeated",
    )
    parser.add_argument("--seeds", type=int, default=3, help="number of runs of every arm")
    parser.add_argument("--max-steps", type=int, help="largest number of steps of a run")
    parser.add_argument(
        "--launcher",
        choices=("inline", "deepspeed"),
        default="inline",
        help="train in this process, or on all devices of this machine",
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument(
        "--dry-run", action="store_true", help="only print the estimated time and disk"
    )
    kinds.add_argument(
        "--train-only",
        metavar="ARM",
        nargs="+",
        help="train these arms (the base is called base) and stop before the measurement on test "
        "prompts, so that several processes can share the training; the same command without "
        "this option measures and writes the results",
    )
    parser.add_argument("--rerun", metavar="ARM", help="train this arm again")
    _add_sweep(parser)
    _add_measuring(parser)
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    return parser.parse_args(arguments)


def _add_sweep(parser: ArgumentParser) -> None:
    sweeping = parser.add_argument_group("selecting a setting for each arm")
    sweeping.add_argument(
        "--sweep",
        metavar="KEY.PATH=VALUE,VALUE,...",
        help="train every arm with each value and the first seed, and continue with the value of "
        "the highest tau on dev prompts (geometric mean over temperatures); for numbers that all "
        "arms share, such as optimizer.learning_rate",
    )
    sweeping.add_argument(
        "--dev-prompts", type=Path, help="prompts that select the value; not test prompts"
    )
    sweeping.add_argument("--dev-num-prompts", type=int, help="by default as many as --num-prompts")


def _add_measuring(parser: ArgumentParser) -> None:
    measuring = parser.add_argument_group("measuring")
    measuring.add_argument(
        "--prompts",
        type=Path,
        help="a prompt file of `jakiro bench`; by default the beginnings of validation documents",
    )
    measuring.add_argument("--num-prompts", type=int, default=40)
    measuring.add_argument("--max-new-tokens", type=int, default=64)
    measuring.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    measuring.add_argument("--candidates", type=int, default=8, help="nodes of a draft tree")
    measuring.add_argument(
        "--trees",
        metavar="OPTIONS",
        nargs="+",
        default=[],
        help="measure every arm with several kinds of trees instead, each as the options of a "
        "drafter of `jakiro bench`: tree=deterministic,candidates=60,levels=8 or "
        "candidates=costs (which leaves 4 prompts out of the report); a sweep uses the trees of "
        "--candidates",
    )
    measuring.add_argument("--repeats", type=int, default=1)


if __name__ == "__main__":
    sys.exit(main())
