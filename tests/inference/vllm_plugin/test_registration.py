"""The plug-in is inert without vLLM, and light where vLLM has it."""

import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from inference import vllm_plugin

# Modules of ours and of others that the plug-in imports beside vLLM and torch.
USED = (
    "inference.vllm_plugin, jakiro.config, jakiro.errors, "
    "jakiro.experts, moa.attention, moa.layers, moa.memory, moa.target_kv, moa.trunk"
)
HEAVY = ("datasets", "deepspeed", "peft", "training", "vllm")


def _run(program: str) -> None:
    subprocess.run([sys.executable, "-c", program], check=True)


def test_importing_the_plugin_imports_neither_vllm_nor_torch() -> None:
    _run(
        "import sys, inference.vllm_plugin\n"
        "sys.exit(any(name in sys.modules for name in ('vllm', 'torch', 'transformers')))"
    )


@pytest.mark.slow
def test_the_modules_that_the_plugin_uses_need_no_heavy_packages() -> None:
    _run(f"import sys, {USED}\nassert not [name for name in {HEAVY} if name in sys.modules]")


def test_vllm_finds_the_plugin_by_its_entry_point() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    value = project["entry-points"]["vllm.general_plugins"]["jakiro"]
    assert EntryPoint("jakiro", value, "vllm.general_plugins").load() is vllm_plugin.register


@pytest.mark.slow
def test_registration_is_the_first_use_of_vllm() -> None:
    # In a process of its own, because `tests/vllm` has the name of the package on pytest's path.
    _run(
        "import inference.vllm_plugin as plugin, sys\n"
        "sys.modules['vllm'] = None  # as if it were not installed\n"
        "try:\n"
        "    plugin.register()\n"
        "except ModuleNotFoundError as error:\n"
        "    sys.exit('vllm' not in str(error))\n"
        "sys.exit(1)"
    )
    assert vllm_plugin.ARCHITECTURE.startswith("Eagle3")
