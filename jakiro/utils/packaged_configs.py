"""The configuration files of this package, which settings files can name instead of a path."""

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
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

    Args:
        path: path of a settings file, or name of a packaged configuration.
    """
    if path.suffix or path.is_absolute() or path.as_posix() not in config_names():
        return path
    return configs_folder() / f"{path}{_SUFFIX}"
