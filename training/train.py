"""The entry point of training, from training data to the finished drafter.

Users run `jakiro train`. A launcher runs `deepspeed --module training.train --config FILE
[--set key.path=value ...]` for any number of processes, or `python -m training.train --config FILE`
for a single process.
"""

import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from rich.progress import Progress
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase

from jakiro.errors import (
    EXIT_CODE_BAD_INPUT,
    EXIT_CODE_INTERRUPTED,
    JakiroError,
    ResourceError,
)
from jakiro.target.checks import CausalLM
from jakiro.utils.files import explain_failed_access
from jakiro.utils.logs import quiet_libraries
from jakiro.utils.settings import load_settings
from training.config import TrainSettings
from training.launch import LAUNCHED, end_with_parent
from training.loop.run import Run
from training.processes import (
    explain_lost_processes,
    join_processes,
    launch_environment,
)
from training.setup.preparation import prepare


def train(
    settings: TrainSettings,
    *,
    model: CausalLM | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Progress | None = None,
) -> Path:
    """Train a drafter and return its folder, `run_folder/drafter`.

    An interrupted run resumes from its last checkpoint. If the run is already finished, the folder
    is returned unchanged.

    Args:
        model: the loaded target, with or without PEFT adapters; None to load the target that the
            settings name.

    Raises:
        ResourceError: there is too little memory or disk space, or another process of the run
            ended.
    """
    # Models are loaded and saved before and during the steps; only the steps have a progress bar.
    with quiet_libraries(), launch_environment(settings.engine.device):
        inputs = prepare(settings, model, tokenizer)
        with (
            explain_lost_processes(),
            join_processes(settings.engine.device) as processes,
        ):
            run = Run(inputs, processes)
            with explain_lost_processes(lambda: run.last_step):
                return run.complete(progress)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train in this process, which a launcher may have started, and return the exit code.

    Users run `jakiro train` instead.
    """
    parser = ArgumentParser(prog="training.train", description="Run one process of a training run.")
    parser.add_argument("--config", type=Path, required=True, help="YAML file of settings")
    parser.add_argument("--set", dest="overrides", metavar="KEY.PATH=VALUE", action="append")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    parser.add_argument("--local_rank", help="passed by launchers")
    options = parser.parse_args(arguments)
    if options.local_rank is not None:
        launcher = end_with_parent()
        if LAUNCHED in os.environ and launcher != os.getsid(0):  # it ended before
            return EXIT_CODE_INTERRUPTED
    try:
        train(load_settings(TrainSettings, options.config, options.overrides or ()))
    except (JakiroError, OSError, SafetensorError) as error:
        explained = error if isinstance(error, JakiroError) else explain_failed_access(error)
        if explained is None or options.debug:
            raise
        # Memory may run out in only one process, or the first process may have been killed. Another
        # process must then print the error.
        is_first = os.environ.get("RANK", "0") == "0"
        if is_first or isinstance(explained, ResourceError):
            print(f"error: {' '.join(str(explained).split())}", file=sys.stderr)  # noqa: T201
        return EXIT_CODE_BAD_INPUT
    except KeyboardInterrupt:  # the next launch resumes from the last checkpoint
        return EXIT_CODE_INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
