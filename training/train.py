"""The entry point of training, from training data to the finished drafter.

Users run `jakiro train`. A launcher runs `deepspeed --module training.train --config FILE
[--set key.path=value ...]` for any number of processes, or `python -m training.train --config FILE`
for a single process. A finished run is recognized by its settings and files, without loading
target or data.
"""

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import suppress
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
from jakiro.utils.files import file_states, fingerprint, write_atomically
from jakiro.utils.logs import get_logger, quiet_libraries
from jakiro.utils.pretrained import model_files
from jakiro.utils.settings import load_settings
from training.config import TrainSettings
from training.data.sources import FileSource, find_sources
from training.distributed.failures import lost_processes_explained
from training.distributed.processes import is_first_process, join_processes, launch_environment
from training.loop.run import Run
from training.loop.run_fingerprint import run_fingerprint
from training.loop.run_folder import RunFolder
from training.setup.preparation import prepare

_RECORD = "inputs.txt"  # in the run folder

_logger = get_logger(__name__)


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
        is_loaded = model is not None or tokenizer is not None  # they may differ from the files
        known = None if is_loaded else inputs_fingerprint(settings)
        if (finished := finished_drafter(settings, known)) is not None:
            return finished
        inputs = prepare(settings, model, tokenizer)
        with (
            lost_processes_explained(),
            join_processes(settings.engine.device) as processes,
        ):
            run = Run(inputs, processes)
            with lost_processes_explained(processes, lambda: run.last_step):
                drafter = run.complete(progress)
            if processes.is_first:
                store_inputs(settings, known)
            return drafter


def inputs_fingerprint(settings: TrainSettings) -> str | None:
    """Return a hash of the settings and of the sizes and times of the files that a run reads.

    Without a local copy of the target or of the drafter that the run starts from, return None.
    """
    start = settings.initialize.drafter
    models = {name: model_files(name) for name in (settings.target.name_or_path, start) if name}
    if any(files is None for files in models.values()):
        return None
    sources = [
        (source.name, file_states([source.path]))
        if isinstance(source, FileSource)
        else (source.name, source.split)
        for source in find_sources(settings.data.paths)
    ]
    facts = {"split": settings.data.split}  # a run compares what it makes of this setting
    return fingerprint(run_fingerprint(settings, facts), sources, models)


def finished_drafter(settings: TrainSettings, inputs: str | None) -> Path | None:
    """Return the drafter of a run if it is finished and was trained with these inputs."""
    folder = RunFolder(settings.run_folder)
    record = folder.path / _RECORD
    if inputs is None or not folder.is_finished or not record.is_file():
        return None
    if record.read_text(encoding="utf-8", errors="replace") != inputs:
        return None
    _logger.info(f"the run in {folder.path} is already finished")
    return folder.drafter


def store_inputs(settings: TrainSettings, inputs: str | None) -> None:
    """Store the inputs of a finished run in its folder."""
    if inputs is not None:
        with suppress(OSError):  # the record only saves time
            write_atomically(RunFolder(settings.run_folder).path / _RECORD, inputs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train in this process, which a launcher may have started, and return the exit code.

    Users run `jakiro train` instead.
    """
    parser = ArgumentParser(prog="training.train", description="Run one process of a training run.")
    parser.add_argument("--config", type=Path, required=True, help="YAML file of settings")
    parser.add_argument("--set", dest="overrides", metavar="KEY.PATH=VALUE", action="append")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    parser.add_argument("--local_rank", help="passed by some launchers; ignored")
    options = parser.parse_args(arguments)
    try:
        train(load_settings(TrainSettings, options.config, options.overrides or ()))
    except JakiroError as error:
        if options.debug:
            raise
        # Memory may run out in only one process, or the first process may have been killed. Another
        # process must then print the error.
        if is_first_process() or isinstance(error, ResourceError):
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr)  # noqa: T201
        return EXIT_CODE_BAD_INPUT
    except KeyboardInterrupt:  # the next launch resumes from the last checkpoint
        return EXIT_CODE_INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
