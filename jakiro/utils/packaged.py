"""What this package consists of: packaged configurations and drafters, and optional packages.

Settings files and commands can name a configuration or a drafter instead of a path. Drafters are
named after their targets.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from jakiro.errors import ConfigError

Extra = Literal["train", "bench", "gguf", "grammar", "serve"]

# Names as they are imported; `pyproject.toml` lists the versions.
EXTRAS: dict[Extra, tuple[str, ...]] = {
    "bench": ("matplotlib",),
    "train": ("datasets", "deepspeed", "matplotlib", "peft", "pyarrow", "tensorboard"),
    "gguf": ("gguf",),
    "grammar": ("llguidance",),
    "serve": ("prometheus_client", "starlette", "uvicorn"),
}
_PACKAGE = Path(__file__).parents[1]
_ASSETS = _PACKAGE / "assets"
_SUFFIX = ".yaml"


def configs_folder() -> Path:
    """Return the folder `configs`: part of the installed package, or beside it in a checkout."""
    installed = _PACKAGE / "configs"
    return installed if installed.is_dir() else _PACKAGE.parent / "configs"


def config_names() -> list[str]:
    """Return the names of all packaged configurations, such as `base` and `drafters/eagle3`."""
    folder = configs_folder()
    files = sorted(folder.rglob(f"*{_SUFFIX}"))
    return [file.relative_to(folder).with_suffix("").as_posix() for file in files]


def config_path(path: Path) -> Path:
    """Return the packaged configuration that a path names, or the path itself if it names none.

    A name has no suffix, and is relative to the folder `configs`.
    """
    if path.suffix or path.is_absolute() or path.as_posix() not in config_names():
        return path
    return configs_folder() / f"{path}{_SUFFIX}"


def assets_of(model: str) -> Path:
    """Return the folder with a model's drafter and what it was trained with."""
    return _ASSETS / model


def packaged_drafter(name: str | Path) -> Path | None:
    """Return the folder of a packaged drafter; None for a local path or an unknown name."""
    folder = assets_of(str(name)) / "drafter"
    is_name = len(Path(name).parts) == 1 and not Path(name).exists()
    return folder if is_name and folder.is_dir() else None


def packaged_names() -> list[str]:
    """Return the names of all drafters in the package."""
    return sorted(folder.parent.name for folder in _ASSETS.glob("*/drafter"))


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
