"""What holds for every test: shapes are checked, the network is left alone, caplog hears us."""

import logging
import os

import pytest
from hypothesis import settings

# The same examples in every run, however busy the machine is.
settings.register_profile("jakiro", deadline=None, derandomize=True)
settings.load_profile("jakiro")

# Before the first import of a Hugging Face library, which reads them once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# Tiny tensors: a second thread costs more than it does, above all on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

PACKAGES = ["inference", "jakiro", "moa", "training"]

if os.environ.get("JAKIRO_RUNTIME_TYPECHECK", "1") != "0":
    from jaxtyping import install_import_hook

    # Before the first import of our packages: only what is imported later is checked.
    install_import_hook(PACKAGES, "beartype.beartype")


@pytest.fixture(autouse=True)
def _caplog_hears_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("jakiro"), "propagate", True)
