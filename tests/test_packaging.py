"""The packages under test are ours, typed and light to import."""

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from importlib import import_module, metadata
from pathlib import Path

import grimp
import pytest

PACKAGES = ("inference", "jakiro", "moa", "training")
CHECKOUT = Path(__file__).resolve().parent.parent
SITE_PACKAGES = Path(sysconfig.get_path("purelib")).resolve()
HOME = SITE_PACKAGES if os.environ.get("JAKIRO_TEST_INSTALLED") == "1" else CHECKOUT


@pytest.mark.parametrize("package", PACKAGES)
def test_the_package_under_test_is_ours_and_typed(package: str) -> None:
    # There is also a package of others with the name `inference`.
    file = import_module(package).__file__
    assert file is not None
    assert Path(file).resolve() == HOME / package / "__init__.py"
    assert (HOME / package / "py.typed").is_file()


def test_the_package_ships_its_drafters() -> None:
    assert list((HOME / "jakiro" / "assets").glob("*/drafter/model.safetensors"))


def test_neither_the_packages_nor_the_help_wait_for_torch() -> None:
    program = f"import sys, {', '.join(PACKAGES)}\n" + (
        "from jakiro.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


@pytest.mark.parametrize("package", ["inference", "jakiro"])
def test_every_exported_name_can_be_imported_and_is_completed(package: str) -> None:
    module = import_module(package)
    assert all(getattr(module, name) is not None for name in module.__all__)
    assert dir(module) == sorted(module.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Nonsense'"):
        _ = module.Nonsense


def test_a_file_with_the_name_of_a_package_is_named(tmp_path: Path) -> None:
    shadow = tmp_path / "inference.py"
    shadow.touch()
    (tmp_path / "script.py").write_text("from jakiro import SpeculativeDecoder")
    run = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True
    )
    *_, last = run.stderr.strip().splitlines()
    assert last.startswith("ImportError: Jakiro's package 'inference' cannot be imported")
    assert str(shadow) in last


def test_decoding_needs_few_packages_beside_torch_and_transformers() -> None:
    theirs, rest = {"torch", "transformers"}, ["torch", "transformers"]
    while rest:
        new = _required(rest.pop()) - theirs
        theirs |= new
        rest += new
    small = {"accelerate", "einops", "jaxtyping", "platformdirs", "psutil"}
    assert _required("jakiro") - theirs == small


def _required(distribution: str) -> set[str]:
    """Return the packages that a distribution needs without any extra."""
    words = [re.split(r"[ ;<>=!~\[(]", text, maxsplit=1)[0] for text in _lines(distribution)]
    return {word.lower().replace("_", "-") for word in words}


def _lines(distribution: str) -> list[str]:
    if distribution == "jakiro":
        return tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["dependencies"]
    try:
        return [text for text in metadata.requires(distribution) or () if "extra ==" not in text]
    except metadata.PackageNotFoundError:  # needed on another platform only
        return []


def test_moa_knows_only_torch_einops_and_jaxtyping() -> None:
    graph = grimp.build_graph("moa", include_external_packages=True, cache_dir=None)
    external = {module for module in graph.modules if graph.is_module_squashed(module)}
    assert external - sys.stdlib_module_names <= {"einops", "jaxtyping", "torch"}
