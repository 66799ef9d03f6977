"""Recognition of finished runs by their settings and files, without loading target or data."""

from contextlib import suppress
from pathlib import Path

from jakiro.utils.files import file_states, fingerprint, write_atomically
from jakiro.utils.logs import get_logger
from jakiro.utils.pretrained import model_files
from training.config import TrainSettings
from training.data.sources import FileSource, find_sources
from training.loop.run_fingerprint import run_fingerprint
from training.loop.run_folder import RunFolder

_RECORD = "inputs.txt"  # in the run folder

_logger = get_logger(__name__)


def inputs_fingerprint(settings: TrainSettings) -> str | None:
    """Return a hash of the settings and of the sizes and times of the files that a run reads.

    Without a local copy of the target or of the drafter that the run starts from, return None.

    Args:
        settings: settings of the run.

    Raises:
        DataError: a data file is missing.
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
    return fingerprint(run_fingerprint(settings, {}), sources, models)


def finished_drafter(settings: TrainSettings, inputs: str | None) -> Path | None:
    """Return the drafter of a run if it is finished and was trained with these inputs.

    Args:
        settings: settings of the run.
        inputs: result of `inputs_fingerprint`.
    """
    folder = RunFolder(settings.run_folder)
    record = folder.path / _RECORD
    if inputs is None or not folder.is_finished or not record.is_file():
        return None
    if record.read_text(encoding="utf-8", errors="replace") != inputs:
        return None
    _logger.info(f"the run in {folder.path} is already finished")
    return folder.drafter


def store_inputs(settings: TrainSettings, inputs: str | None) -> None:
    """Store the inputs of a finished run in its folder.

    Args:
        settings: settings of the run.
        inputs: result of `inputs_fingerprint` before the run started.
    """
    if inputs is not None:
        with suppress(OSError):  # the record only saves time
            write_atomically(RunFolder(settings.run_folder).path / _RECORD, inputs)
