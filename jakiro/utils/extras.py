"""Packages that only some commands need, and the extras that install these packages."""

from importlib.util import find_spec
from typing import Literal

from jakiro.errors import ConfigError

Extra = Literal["train", "bench", "gguf", "serve"]

# Names as they are imported; `pyproject.toml` lists the versions.
EXTRAS: dict[Extra, tuple[str, ...]] = {
    "bench": ("matplotlib",),
    "train": ("datasets", "deepspeed", "matplotlib", "peft", "pyarrow", "tensorboard"),
    "gguf": ("gguf",),
    "serve": ("prometheus_client", "starlette", "uvicorn"),
}


def require_extra(extra: Extra) -> None:
    """Check that the packages of an extra are installed, without importing them."""
    for package in EXTRAS[extra]:
        require_package(package)


def require_package(package: str) -> None:
    """Check that a package of an extra is installed, without importing it."""
    error = missing_extra(ModuleNotFoundError(name=package))
    if error is not None and find_spec(package) is None:
        raise error


def missing_extra(error: ModuleNotFoundError) -> ConfigError | None:
    """Return an error that names the extra of a missing package; None for other packages."""
    package = (error.name or "").partition(".")[0]
    extra = next((extra for extra, packages in EXTRAS.items() if package in packages), None)
    if extra is None:
        return None
    return ConfigError(
        f"the package {package} is not installed",
        remedy=f"install Jakiro with the extra `{extra}`, such as with `pip install '.[{extra}]'`",
    )
