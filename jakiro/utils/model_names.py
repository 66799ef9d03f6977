"""Names of models, and quick checks of them.

Nothing here imports torch or transformers, so that commands can refuse a wrong name at once.
"""

import re
from difflib import get_close_matches
from pathlib import Path

from jakiro.errors import CheckpointError, ConfigError
from jakiro.utils.fetch import KNOWN_MODELS, fetched_model
from jakiro.utils.hub import is_in_cache, refuse_missing_folder, why_out_of_reach
from jakiro.utils.packaged import packaged_drafter

CHECK_THE_PATH = "check the path"
DRAFTER_REMEDY = "check the path, or train a drafter with `jakiro train`"
_SUFFIX = ".gguf"
_PART = re.compile(
    r"-\d{5}-of-(?!00001$)\d{5}$"
)  # end of the name of a file with a part of a model
_ALIKE = 0.7  # similarity from which a name is taken for a misspelled one


def refuse_missing_model(
    name_or_path: str | Path, what: str = "the target", remedy: str = CHECK_THE_PATH
) -> None:
    """Raise the error that loading a model would raise, if there is certainly no such model.

    Args:
        name_or_path: folder or hub id of the model, or any other name that `local_model` accepts.
        what: description of the model in error messages.
        remedy: advice at the end of error messages.

    Raises:
        CheckpointError: the name is the path of a missing folder, similar to that of a known model,
            or neither in the cache nor on a hub within reach; or a known model has not been
            fetched.
        ConfigError: the name is a GGUF file that does not exist, or a folder with several of them.
    """
    name = str(name_or_path)
    if find_gguf(fetched_model(name) or name) is not None or Path(name).exists():
        return
    refuse_missing_folder(name, what, remedy)
    if is_in_cache(name):
        return
    reason = why_out_of_reach()
    if reason is not None or ("/" not in name and similar_model(name, _ALIKE) is not None):
        reason = reason or "no such folder, and no such model in the cache"
        raise no_such_model(name, what, reason, remedy)


def refuse_missing_drafter(name: str) -> None:
    """Raise the error that loading a trained drafter would raise, if there is certainly none.

    Args:
        name: folder or hub id of the drafter, or name of a drafter in this package.

    Raises:
        CheckpointError: the name is the path of a missing folder, or neither in the cache nor on a
            hub within reach.
    """
    if packaged_drafter(name) is not None or Path(name).exists():
        return
    refuse_missing_folder(name, "a drafter from", DRAFTER_REMEDY)
    reason = None if is_in_cache(name) else why_out_of_reach()
    if reason is not None:
        raise no_such_drafter(name, reason)


def no_such_drafter(path: str | Path, got: str) -> CheckpointError:
    """Return the error for a trained drafter that cannot be loaded.

    Args:
        path: folder or hub id of the drafter.
        got: description of the fault.
    """
    return CheckpointError(
        f"cannot load a drafter from {path}",
        expected="a folder or hub id with config.json and model.safetensors, as written by "
        "save_pretrained",
        got=got,
        remedy=DRAFTER_REMEDY,
    )


def no_such_model(
    name_or_path: str | Path, what: str, got: str, remedy: str = CHECK_THE_PATH
) -> CheckpointError:
    """Return the error for a model that cannot be loaded.

    Args:
        name_or_path: folder or hub id of the model.
        what: description of the model.
        got: description of the fault.
        remedy: advice at the end of the message, unless a known model has a similar name.
    """
    similar = similar_model(str(name_or_path))
    similar = None if similar == str(name_or_path) else similar
    return CheckpointError(
        f"cannot load {what} {name_or_path}",
        expected="a folder or hub id of a causal language model with its tokenizer",
        got=got,
        remedy=f"use {similar}, which `jakiro fetch` downloads" if similar else remedy,
    )


def similar_model(name: str, cutoff: float = 0.6) -> str | None:
    """Return the known model whose name is most similar to another name; None if none is.

    Args:
        name: another name.
        cutoff: smallest similarity, from 0 to 1.
    """
    return next(iter(get_close_matches(name, KNOWN_MODELS, n=1, cutoff=cutoff)), None)


def find_gguf(name_or_path: str | Path) -> Path | None:
    """Return the GGUF file that a path refers to; None if the path refers to something else.

    Args:
        name_or_path: path of a GGUF file, or of a folder that contains one and has no config.json.

    Raises:
        ConfigError: the file does not exist, or the folder contains several GGUF files.
    """
    path = Path(name_or_path)
    if path.suffix.lower() == _SUFFIX:
        if not path.is_file():
            raise ConfigError(
                f"there is no file {path}",
                expected="an existing GGUF file",
                got="nothing at this path" if not path.exists() else "a folder",
                remedy="check the path",
            )
        if _PART.search(path.stem):
            raise ConfigError(
                f"{path} is a part of a model",
                expected="a GGUF file that contains the whole model",
                got=path.name,
                remedy="join the parts (llama-gguf-split --merge FIRST_PART WHOLE.gguf)",
            )
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(file for file in path.iterdir() if file.suffix.lower() == _SUFFIX)
    if len(files) > 1:
        raise ConfigError(
            f"the folder {path} contains several models",
            expected="a folder with a single GGUF file, or the path of a GGUF file",
            got=", ".join(file.name for file in files),
            remedy="pass the path of the file to load",
        )
    return files[0] if files else None
