"""Packages that only some commands need, and the extras that install these packages."""

from jakiro.errors import ConfigError

# Names as they are imported; `pyproject.toml` lists the versions.
EXTRAS = {
    "train": ("datasets", "deepspeed", "matplotlib", "peft", "tensorboard"),
    "bench": ("matplotlib",),
    "gguf": ("gguf",),
}
_INDIRECT = {"pyarrow": "train"}  # installed with another package of the extra


def missing_extra(error: ModuleNotFoundError) -> ConfigError | None:
    """Return an error that names the extra of a missing package; None for other packages.

    Args:
        error: the error of the import that failed.
    """
    package = (error.name or "").partition(".")[0]
    found = [name for name, packages in EXTRAS.items() if package in packages]
    extra = found[-1] if found else _INDIRECT.get(package)
    if extra is None:
        return None
    return ConfigError(
        f"the package {package} is not installed",
        expected=f"the packages of the extra `{extra}`",
        got="an installation without them",
        remedy=f"install Jakiro with the extra, such as with `pip install '.[{extra}]'`",
    )
