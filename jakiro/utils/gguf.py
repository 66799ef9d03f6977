"""Conversion of GGUF files to model folders, which are then loaded like any other model.

transformers reads the file and dequantizes its weights, which are then stored as safetensors in a
folder of the user's cache. The folder's name depends on the contents of the file, the dtype and the
version of transformers.
"""

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

from jakiro.errors import CheckpointError
from jakiro.utils.devices import default_dtype, is_out_of_memory, too_little_memory
from jakiro.utils.fetch import CONFIG_KEY
from jakiro.utils.files import checksum, written_folder
from jakiro.utils.logs import get_logger, quiet_libraries
from jakiro.utils.packaged import require_extra
from jakiro.utils.wording import dtype_name, summary_of

_logger = get_logger(__name__)


def convert_gguf(file: Path, dtype: torch.dtype | None = None, *, any_dtype: bool = False) -> Path:
    """Return a folder with the converted model and tokenizer of a GGUF file.

    The file is converted if that has not been done yet.

    Args:
        any_dtype: whether an existing folder with weights in another dtype can be returned, because
            only the config or the tokenizer is needed.
    """
    dtype = dtype or default_dtype()
    sha256 = _sha256(file.resolve(), file.stat().st_mtime_ns)
    parent = user_cache_path("jakiro") / "gguf"
    name = "-".join((sha256[:16], dtype_name(dtype), transformers.__version__))
    folder = parent / name
    similar = sorted(parent.glob(name.replace(dtype_name(dtype), "*"))) if any_dtype else []
    if folder.is_dir() or similar:
        return folder if folder.is_dir() else similar[0]
    require_extra("gguf")
    parent.mkdir(parents=True, exist_ok=True)
    with FileLock(parent / f"{name}.lock"):
        if not folder.is_dir():
            _logger.info("converting %s to %s in %s", file, dtype_name(dtype), folder)
            with quiet_libraries():
                _convert(file, sha256, dtype, folder)
    return folder


@cache
def _sha256(file: Path, _modified: int) -> str:
    return checksum(file)


def _convert(file: Path, sha256: str, dtype: torch.dtype, folder: Path) -> None:
    try:
        with written_folder(folder) as partial:
            _dequantized_model(file, sha256, dtype).save_pretrained(partial)
            tokenizer = AutoTokenizer.from_pretrained(
                file.parent, gguf_file=file.name, trust_remote_code=False
            )
            tokenizer.save_pretrained(partial)
    except Exception as error:  # for a damaged file, the parser may raise almost any exception
        if is_out_of_memory(error):
            raise too_little_memory(f"the GGUF file {file}", error) from error
        raise CheckpointError(
            f"cannot convert the GGUF file {file}",
            got=summary_of(error),
            remedy="use the safetensors files of the model; if the disk is full, free space, or "
            "set XDG_CACHE_HOME to a folder on another disk",
        ) from error


def _dequantized_model(file: Path, sha256: str, dtype: torch.dtype) -> Any:
    """Return an ordinary model: transformers cannot save a model that is marked as quantized."""
    options: dict[str, Any] = {"gguf_file": file.name, "dtype": dtype, "trust_remote_code": False}
    # The bar of transformers cannot be switched off, and fills log files.
    modeling_gguf_pytorch_utils.tqdm = lambda tensors, **_: tensors  # type: ignore[attr-defined]
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
    setattr(config, CONFIG_KEY, {"file": file.name, "sha256": sha256})
    with torch.device("meta"):
        model: Any = type(loaded)(config)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = GenerationConfig.from_dict(loaded.generation_config.to_dict())
    return model
