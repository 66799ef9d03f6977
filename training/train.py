"""The entry point of training, from text files to the finished drafter.

`deepspeed --module training.train --config FILE [--set key.path=value ...]` on any number of
processes, `python -m training.train --config FILE` on one.
"""

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from rich.progress import Progress
from transformers import PreTrainedTokenizerBase

from jakiro.errors import (
    EXIT_CODE_BAD_INPUT,
    EXIT_CODE_INTERRUPTED,
    JakiroError,
    ResourceError,
)
from jakiro.target.checks import CausalLM
from jakiro.utils.logs import quiet_libraries
from jakiro.utils.settings import load_settings
from training.config import TrainSettings
from training.distributed.processes import is_first_process, join_processes, launch_environment
from training.loop.run import Run
from training.setup.preparation import prepare


def train(
    settings: TrainSettings,
    *,
    model: CausalLM | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Progress | None = None,
) -> Path:
    """Train a drafter and return its folder, `run_folder/drafter`.

    An interrupted run goes on from its last checkpoint; a finished one is returned as it is.

    Args:
        settings: settings of the run.
        model: the loaded target, perhaps with adapters by PEFT; None to load it by name.
        tokenizer: the target's tokenizer; None to load it by name.
        progress: display that shows the optimizer steps; None for a new one on standard error.

    Raises:
        ConfigError: settings do not fit together, or the run folder holds another run.
        DataError: data is missing or malformed, or holds nothing to learn from.
        PromptError: the prompts to evaluate on cannot be decoded.
        CheckpointError: the target or a checkpoint cannot be loaded.
        TargetNotSupported: the target cannot be drafted for.
        NumericalError: a loss is not finite.
        ResourceError: there is too little memory or disk space.
    """
    with launch_environment(settings.engine.device):
        inputs = prepare(settings, model, tokenizer)
        # Drafters are saved and loaded while the progress bar is shown.
        with quiet_libraries(), join_processes(settings.engine.device) as processes:
            return Run(inputs, processes).complete(progress)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train in this process of a launcher, and return the exit code; for users `jakiro train`."""
    parser = ArgumentParser(prog="training.train", description="Train one process of a run.")
    parser.add_argument("--config", type=Path, required=True, help="YAML file of settings")
    parser.add_argument("--set", dest="overrides", metavar="KEY.PATH=VALUE", action="append")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    parser.add_argument("--local_rank", help="passed by some launchers, and ignored")
    options = parser.parse_args(arguments)
    try:
        train(load_settings(TrainSettings, options.config, options.overrides or ()))
    except JakiroError as error:
        if options.debug:
            raise
        # Memory may run out in one process alone, which then has to print the error.
        if is_first_process() or isinstance(error, ResourceError):
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr)  # noqa: T201
        return EXIT_CODE_BAD_INPUT
    except KeyboardInterrupt:  # the next start continues from the last checkpoint
        return EXIT_CODE_INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
