"""Packages that only some commands need, and the extras that install these packages."""

from importlib.util import find_spec
from typing import Literal

from jakiro.errors import ConfigError

# Names as they are imported; `pyproject.toml` lists the versions.
EXTRAS = {
    "train": ("datasets", "deepspeed", "matplotlib", "peft", "tensorboard"),
    "bench": ("matplotlib",),
    "gguf": ("gguf",),
    "serve": ("prometheus_client", "starlette", "uvicorn"),
}
_INDIRECT = {"pyarrow": "train"}  # installed with another package of the extra


def missing_extra(error: ModuleNotFoundError) -> ConfigError | None:
    """Return an error that names the extra of a missing package; None for other packages."""
    package = (error.name or "").partition(".")[0]
    found = [name for name, packages in EXTRAS.items() if package in packages]
    extra = found[-1] if found else _INDIRECT.get(package)
    return None if extra is None else _error(package, extra)


def require_package(package: str) -> None:
    """Check that a package of an extra is installed, without importing it."""
    if find_spec(package) is None:
        error = missing_extra(ModuleNotFoundError(name=package))
        assert error is not None, "packages of extras are known"
        raise error


def require_extra(extra: Literal["train", "bench", "gguf", "serve"]) -> None:
    """Check that the packages of an extra are installed, without importing them."""
    for package in EXTRAS[extra]:
        if find_spec(package) is None:
            raise _error(package, extra)


def _error(package: str, extra: str) -> ConfigError:
    return ConfigError(
        f"the package {package} is not installed",
        expected=f"the packages of the extra `{extra}`",
        got="an installation without them",
        remedy=f"install Jakiro with the extra, such as with `pip install '.[{extra}]'`",
    )
