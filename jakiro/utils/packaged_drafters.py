"""The trained drafters in this package, which are named after the models that they draft for."""

from pathlib import Path

_ASSETS = Path(__file__).parents[1] / "assets"


def assets_of(model: str) -> Path:
    """Return the folder with a model's drafter, and the data and settings that it was trained with.

    Args:
        model: name of a model that `jakiro fetch` knows.
    """
    return _ASSETS / model


def packaged_drafter(name: str | Path) -> Path | None:
    """Return the folder of a packaged drafter; None for a local path or an unknown name.

    Args:
        name: name of a model that `jakiro fetch` knows, or any other name or path.
    """
    folder = assets_of(str(name)) / "drafter"
    is_name = len(Path(name).parts) == 1 and not Path(name).exists()
    return folder if is_name and folder.is_dir() else None


def packaged_names() -> list[str]:
    """Return the names of all drafters in the package."""
    return sorted(folder.parent.name for folder in _ASSETS.glob("*/drafter"))
