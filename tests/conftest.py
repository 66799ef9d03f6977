"""Setup of every test: shape checks, no network, an empty cache, markers by folder, time limits."""

import gc
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import settings

# The same examples in every run, however busy the machine is.
settings.register_profile("jakiro", deadline=None, derandomize=True)
settings.load_profile("jakiro")

# Set before the first import of a Hugging Face library, which reads these variables only once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# The tensors are tiny: a second thread costs more time than it saves, above all on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts background processes with SIGINT ignored, which the tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No test outlives a power cut, and waiting for the disk takes longer than many a test.
os.fsync = lambda _: None

# Types and shapes are checked in calls with tensors of these modules in every run; `all` checks
# every call of every package, which takes far longer, and `0` none (where beartype is missing).
CHECKED = {
    "0": [],
    "tensors": [
        "inference.draft_tree",
        "inference.engine",
        "inference.trees",
        "jakiro.drafter",
        "jakiro.experts",
        "jakiro.levels",
        "moa",
        "training.loss",
    ],
    "all": ["inference", "jakiro", "moa", "training"],
}
MODE = os.environ.get("JAKIRO_RUNTIME_TYPECHECK", "tensors")

if CHECKED[MODE]:
    import jaxtyping

    jaxtyped = jaxtyping.jaxtyped

    def jaxtyped_if_tensors(**options: Any) -> Any:
        """Leave functions and classes that name no shape to mypy."""

        def decorated(item: Any) -> Any:
            named = "jaxtyping." in str(item.__annotations__)
            return jaxtyped(item, **options) if named else item

        return decorated

    if MODE == "tensors":
        jaxtyping.jaxtyped = jaxtyped_if_tensors
    # Installed before the first import of our packages: only later imports are checked.
    jaxtyping.install_import_hook(CHECKED[MODE], "beartype.beartype")


@pytest.fixture(autouse=True)
def _caplog_hears_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("jakiro"), "propagate", True)


@pytest.fixture(scope="session", autouse=True)
def _known_targets_are_not_probed_again() -> Iterator[None]:
    # Imported here, because the hook above must come first.
    from helpers.known_targets import probe_once

    from jakiro.target.adapter import TargetAdapter

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TargetAdapter, "_probe", probe_once)
        yield


CACHE = pytest.StashKey[TemporaryDirectory[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Keep what tests measure and prepare out of the cache of the person who runs them."""
    if not hasattr(config, "workerinput"):  # a worker, like every process, inherits the variable
        config.stash[CACHE] = TemporaryDirectory(prefix="jakiro-tests-")
        os.environ["XDG_CACHE_HOME"] = config.stash[CACHE].name
        # Every client would read the certificates of all authorities, which no server here needs.
        os.environ.pop("SSL_CERT_FILE", None)
        os.environ["SSL_CERT_DIR"] = config.stash[CACHE].name


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the cache of the tests."""
    if (cache := config.stash.get(CACHE, None)) is not None:
        cache.cleanup()


def pytest_collection_finish() -> None:
    """Spare the garbage collector all modules and tests, and let it look less often."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # tests are short, and what they leave is small


TESTS = Path(__file__).parent
WHOLE_PROGRAMS = TESTS / "e2e"
# Their files take longest. What comes last should be short: a worker without files left waits.
BEFORE_OTHERS = {WHOLE_PROGRAMS, TESTS / "training"}
SECONDS_OF_PROCESSES = 300  # for tests that start processes or whole programs
SECONDS_OF_LONG_TESTS = 1800  # for tests with the markers slow and faults


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests of whole programs, raise the time limit of long tests, and sort the files."""
    items.sort(key=lambda item: BEFORE_OTHERS.isdisjoint(item.path.parents))
    for item in items:
        if WHOLE_PROGRAMS in item.path.parents:
            item.add_marker("e2e")
        if item.get_closest_marker("slow") or item.get_closest_marker("faults"):
            item.add_marker(pytest.mark.timeout(SECONDS_OF_LONG_TESTS))
        elif item.get_closest_marker("distributed") or item.get_closest_marker("e2e"):
            item.add_marker(pytest.mark.timeout(SECONDS_OF_PROCESSES))
