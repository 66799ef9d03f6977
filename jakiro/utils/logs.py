"""Logging to standard error, from the first process only; hiding the output of libraries."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

_ROOT = "jakiro"


def get_logger(name: str) -> logging.Logger:
    """Return a logger below `jakiro` that writes to standard error on rank 0 only."""
    _configure_root()
    is_below_root = name == _ROOT or name.startswith(f"{_ROOT}.")
    return logging.getLogger(name if is_below_root else f"{_ROOT}.{name}")


@cache
def _configure_root() -> None:
    handler = _Handler()
    handler.setFormatter(logging.Formatter("[%(asctime)s] %(levelname)s %(message)s", "%X"))
    handler.addFilter(_is_first_process)
    root = logging.getLogger(_ROOT)
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    root.propagate = False  # otherwise an application's own root handler repeats each line


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to what is standard error at the time, such as the display of a progress bar."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is not None:  # as in a service without one
            super().emit(record)


def _is_first_process(_record: logging.LogRecord) -> bool:
    # The rank is read for each record, because a launcher may set it after the first import.
    return os.environ.get("RANK", "0") == "0"


def _is_important(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Setting accelerator to CPU")


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Hide the progress bars and hints of transformers, which would disrupt Jakiro's own output.

    Downloads from the hub, which may take long, still show their progress. Where DeepSpeed is
    installed, accelerate imports it to save a model, and DeepSpeed then writes to standard output
    that there is no GPU; this is hidden as well.
    """
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging as transformers_logging  # takes seconds to import

    verbosity = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    shows_downloads = not are_progress_bars_disabled()
    logging.getLogger("DeepSpeed").addFilter(_is_important)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()  # hides downloads as well
    if shows_downloads:
        enable_progress_bars()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars and shows_downloads:  # otherwise the caller had hidden some of them before
            transformers_logging.enable_progress_bar()
