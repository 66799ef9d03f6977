"""Loads the programs in `docs/programs`."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[2] / "docs" / "programs"


def load_program(name: str) -> ModuleType:
    """Return a program as a module, without running it."""
    if str(FOLDER) not in sys.path:  # programs import each other
        sys.path.append(str(FOLDER))
    spec = spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
