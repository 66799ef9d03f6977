"""Conversion of GGUF files to model folders, which are then loaded like any other model.

transformers reads the file and dequantizes its weights, which are then stored as safetensors in a
folder of the user's cache. The folder's name depends on the contents of the file, the dtype and the
version of transformers.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock
from platformdirs import user_cache_path
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    modeling_gguf_pytorch_utils,
)

from jakiro.errors import CheckpointError, ConfigError
from jakiro.utils.dtype_names import dtype_name
from jakiro.utils.extras import require_extra
from jakiro.utils.files import publish
from jakiro.utils.logs import get_logger, quiet_libraries
from jakiro.utils.memory import is_out_of_memory, too_little_memory
from jakiro.utils.processor import native_dtype
from jakiro.utils.progress import ProgressDisplay

# Key in a converted model's config; its value holds the GGUF file's name and checksum.
CONFIG_KEY = "gguf"
_THEIR_BAR = "tqdm"  # name of the progress bar in the module of transformers that reads the files

_PART = re.compile(r"-\d{5}-of-(?!00001$)\d{5}$")  # end of the name of a part of a model

_logger = get_logger(__name__)


def convert_gguf(file: Path, dtype: torch.dtype | None = None, *, any_dtype: bool = False) -> Path:
    """Return a folder with the converted model and tokenizer of a GGUF file.

    The file is converted if that has not been done yet.

    Args:
        any_dtype: whether an existing folder with weights in another dtype can be returned, because
            only the config or the tokenizer is needed.
    """
    dtype = dtype or default_dtype()
    checksum = _checksum(file.resolve(), file.stat().st_mtime_ns)
    parent = user_cache_path("jakiro") / "gguf"
    name = "-".join((checksum[:16], dtype_name(dtype), transformers.__version__))
    folder = parent / name
    similar = sorted(parent.glob(name.replace(dtype_name(dtype), "*"))) if any_dtype else []
    if folder.is_dir() or similar:
        return folder if folder.is_dir() else similar[0]
    require_extra("gguf")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with FileLock(parent / f"{name}.lock"):
            if not folder.is_dir():
                _logger.info("converting %s to %s in %s", file, dtype_name(dtype), folder)
                with quiet_libraries():
                    _convert(file, checksum, dtype, folder)
    except OSError as error:
        raise _unreadable(file, error) from error
    return folder


def find_gguf(name_or_path: str | Path) -> Path | None:
    """Return the GGUF file that a path refers to; None if the path refers to something else.

    Args:
        name_or_path: path of a GGUF file, or of a folder that contains one and has no config.json.
    """
    path = Path(name_or_path)
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ConfigError(
                f"there is no file {path}",
                remedy="check the path of the GGUF file",
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
    files = sorted(file for file in path.iterdir() if file.suffix.lower() == ".gguf")
    if len(files) > 1:
        raise ConfigError(
            f"the folder {path} contains several models",
            expected="a folder with a single GGUF file, or the path of a GGUF file",
            got=", ".join(file.name for file in files),
            remedy="pass the path of the file to load",
        )
    return files[0] if files else None


def gguf_checksum(config: Any) -> str | None:
    """Return the SHA-256 of the GGUF file that a model was converted from, or None."""
    origin = getattr(config, CONFIG_KEY, None)
    return None if origin is None else str(origin["sha256"])


def default_dtype() -> torch.dtype:
    """Return bfloat16 if this machine supports it in hardware, and float32 otherwise.

    A GGUF file does not prescribe a dtype: its weights can be dequantized to any floating-point
    dtype.
    """
    return native_dtype(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


@cache
def _checksum(file: Path, _modified: int) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _convert(file: Path, checksum: str, dtype: torch.dtype, folder: Path) -> None:
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        _dequantized_model(file, checksum, dtype).save_pretrained(partial)
        tokenizer = AutoTokenizer.from_pretrained(
            file.parent, gguf_file=file.name, trust_remote_code=False
        )
        tokenizer.save_pretrained(partial)
        publish(partial, folder)
    except OSError:
        raise
    except Exception as error:  # for a damaged file, the parser may raise almost any exception
        if is_out_of_memory(error):
            raise too_little_memory(f"the GGUF file {file}", error) from error
        raise _unreadable(file, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _dequantized_model(file: Path, checksum: str, dtype: torch.dtype) -> Any:
    """Return an ordinary model: transformers cannot save a model that is marked as quantized."""
    options: dict[str, Any] = {"gguf_file": file.name, "dtype": dtype, "trust_remote_code": False}
    with _tidy_progress():
        read: Any = AutoModelForCausalLM.from_pretrained(
            file.parent, **options, output_loading_info=True
        )
    loaded, report = read
    if missing := sorted(report["missing_keys"]):  # these would have random values
        raise ValueError(
            f"the file has no tensors for {len(missing)} weights, such as {missing[0]}"
        )
    config = loaded.config
    del config.quantization_config
    setattr(config, CONFIG_KEY, {"file": file.name, "sha256": checksum})
    with torch.device("meta"):
        model: Any = type(loaded)(config)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = GenerationConfig.from_dict(loaded.generation_config.to_dict())
    return model


@contextmanager
def _tidy_progress() -> Iterator[None]:
    """Replace the bar of transformers, which cannot be switched off and fills log files."""
    theirs = getattr(modeling_gguf_pytorch_utils, _THEIR_BAR, None)

    def steps(tensors: Sequence[object], **_options: object) -> Iterator[object]:
        with ProgressDisplay() as display:
            yield from display.track(tensors, description="Converting weights")

    if theirs is None:  # another version of transformers
        yield
        return
    setattr(modeling_gguf_pytorch_utils, _THEIR_BAR, steps)
    try:
        yield
    finally:
        setattr(modeling_gguf_pytorch_utils, _THEIR_BAR, theirs)


def _unreadable(file: Path, error: Exception) -> CheckpointError:
    lines = str(error).strip().splitlines()
    match error:
        case OSError():
            expected = "a readable file, and room for the converted model in the cache folder"
            remedy = "free disk space, or set XDG_CACHE_HOME to a folder on another disk"
        case _:
            expected = "a complete GGUF file of a model that transformers can read"
            remedy = "use the safetensors files of the model"
    return CheckpointError(
        f"cannot convert the GGUF file {file}",
        expected=expected,
        got=lines[0] if lines else type(error).__name__,
        remedy=remedy,
    )
