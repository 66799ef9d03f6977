"""Loading of causal language models, their tokenizers and configs, from folders or from the hub.

All code that loads a target or a small model uses these functions, so that the names of dtypes have
the same meaning everywhere and loading errors are always worded in the same way.
"""

import json
import re
import socket
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from huggingface_hub import constants
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from jakiro.errors import CheckpointError, ConfigError, JakiroError, ResourceError
from jakiro.utils.devices import is_out_of_memory, too_little_memory
from jakiro.utils.fetch import KNOWN_MODELS, fetched_model, find_gguf
from jakiro.utils.logs import get_logger
from jakiro.utils.packaged import require_package
from jakiro.utils.wording import SHORT_NAMES, dtype_name, rounded, summary_of

_logger = get_logger(__name__)

# The training settings use the short names; transformers uses the long names.
TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, long) for long, short in SHORT_NAMES.items() for name in (short, long)
}
# Errors of transformers and of the libraries it uses when files are damaged or do not fit together,
# or when memory does not suffice.
LOADING_ERRORS = (
    AttributeError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
    TypeError,
    UnpicklingError,
    ValueError,
)
_SECONDS = 3.0  # time in which the hub must accept a connection
_CHECK_THE_PATH = "check the path"
_NUMBER = re.compile(r"\d+")  # of a layer, in the name of a weight
_ADAPTERS = "adapter_config.json"
# Code in a model's folder is run only if the caller asks for it.
_NO_CODE = {"trust_remote_code": False}


def load_causal_lm(
    name_or_path: str | Path,
    what: str = "the target",
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    remedy: str = _CHECK_THE_PATH,
    **load: Any,
) -> PreTrainedModel:
    """Return a causal language model in evaluation mode.

    Args:
        name_or_path: folder or hub id of the model or of PEFT adapters for a model, or any other
            name that `local_model` accepts.
        dtype: dtype of the weights, as a torch dtype, a name from `TORCH_DTYPES`, or "auto" for the
            dtype in which the weights were saved; None for transformers' default.
        device: device of the weights; None for the devices in `device_map`, or for the CPU if that
            is not passed.

    Raises:
        CheckpointError: the model cannot be loaded, or its weights do not match its config.
        ConfigError: the name is a GGUF file that does not exist, or a folder with several of them;
            or there is no such dtype.
        ResourceError: there is too little memory for the model.
    """
    if dtype is not None:
        load["dtype"] = torch_dtype(dtype)
    folder = local_model(name_or_path, load.get("dtype"))
    if (Path(folder) / _ADAPTERS).exists():  # without this package, they would not be recognized
        require_package("peft")
    hub = hub_options(folder)
    load = _NO_CODE | hub | {"adapter_kwargs": hub} | load | {"output_loading_info": True}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, **load)
        model, report = loaded
        _refuse_other_weights(model.state_dict().keys(), report, f"{what} {name_or_path}")
        model = model if device is None else model.to(device)
    except LOADING_ERRORS as error:
        raise _cannot_load(what, name_or_path, error, remedy) from error
    if folder != str(name_or_path):
        # Records contain the name that the user gave, not the path of a folder in the cache.
        model.config.name_or_path = model.name_or_path = str(name_or_path)
    if model.dtype is torch.float16 and model.device.type == "cpu":
        _logger.warning(
            "%s has float16 weights: a CPU reads prompts and drafts with them several times more "
            "slowly than with float32 or bfloat16; remedy: decode with another --dtype, and train "
            "with another target.dtype",
            what,
        )
    return cast(PreTrainedModel, model.eval())


def load_target(
    name_or_path: str, dtype: str | torch.dtype, device: torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    model = load_causal_lm(name_or_path, dtype=dtype, device=device)
    return model, load_tokenizer(name_or_path, "the tokenizer of the target")


def torch_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """Return the dtype of a name; "auto" and dtypes are unchanged."""
    if not isinstance(dtype, str) or dtype == "auto":
        return dtype
    named = TORCH_DTYPES.get(dtype, getattr(torch, dtype, None))
    if not isinstance(named, torch.dtype):
        raise ConfigError(
            "dtype= cannot be used", expected=f"auto, {', '.join(TORCH_DTYPES)}", got=repr(dtype)
        )
    return named


def local_model(name_or_path: str | Path, dtype: object = None, *, any_dtype: bool = False) -> str:
    """Return a folder or hub id from which transformers can load a model, converting GGUF files.

    Args:
        name_or_path: folder or hub id of a model, which is returned unchanged; a GGUF file or a
            folder that contains one; or the name of a model that `jakiro fetch` downloaded.
        any_dtype: whether an earlier conversion of a GGUF file can be returned, whatever its dtype.
    """
    fetched = fetched_model(str(name_or_path))
    file = find_gguf(fetched or name_or_path)
    if file is None:
        return str(name_or_path)
    from jakiro.utils.gguf import convert_gguf  # most models are not in such a file

    wanted = dtype if isinstance(dtype, torch.dtype) else None
    return str(convert_gguf(file, wanted, any_dtype=any_dtype))


def load_tokenizer(
    name_or_path: str | Path,
    what: str = "a tokenizer from",
    *,
    remedy: str = _CHECK_THE_PATH,
    **load: Any,
) -> PreTrainedTokenizerBase:
    """Return the tokenizer from a folder or from the hub.

    For a folder of PEFT adapters without a tokenizer, this is the tokenizer of the adapted model.
    """
    folder = local_model(name_or_path, any_dtype=True)
    try:
        tokenizer = _read_tokenizer(folder, **hub_options(folder) | load)
    except LOADING_ERRORS as error:
        raise _cannot_load(what, name_or_path, error, remedy) from error
    if tokenizer is None:
        raise _cannot_load(what, name_or_path, "a folder without a tokenizer", remedy)
    return tokenizer


def _read_tokenizer(folder: str, **load: Any) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer from a folder or hub id; None if there are no files of a tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(_tokenizer_folder(folder), **_NO_CODE | load)
    # Without any file, transformers returns a tokenizer that knows special tokens only.
    return None if len(tokenizer) <= len(tokenizer.all_special_tokens) else tokenizer


def _tokenizer_folder(folder: str) -> str:
    """Return the folder or hub id with the tokenizer of a model or of adapters."""
    adapters = Path(folder) / _ADAPTERS
    if (Path(folder) / "tokenizer_config.json").exists() or not adapters.exists():
        return folder
    return str(json.loads(adapters.read_bytes()).get("base_model_name_or_path") or folder)


def local_tokenizer(name_or_path: str | Path) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer from a folder or the local hub cache, or None if neither has it."""
    try:
        return _read_tokenizer(local_model(name_or_path, any_dtype=True), local_files_only=True)
    except (*LOADING_ERRORS, JakiroError):
        return None


def load_config(
    name_or_path: str | Path,
    what: str = "the config of the target",
    *,
    remedy: str = _CHECK_THE_PATH,
) -> PreTrainedConfig:
    """Return a model's config; for PEFT adapters, the config of the model that they adapt."""
    from transformers.utils.peft_utils import find_adapter_config_file

    path = local_model(name_or_path, any_dtype=True)
    hub: dict[str, Any] = hub_options(path)
    try:
        if find_adapter_config_file(path, local_files_only=bool(hub)) is not None:
            from peft import PeftConfig  # an optional package, and slow to import

            path = PeftConfig.from_pretrained(path, **hub).base_model_name_or_path or path
        return AutoConfig.from_pretrained(path, **_NO_CODE, **hub_options(path))
    except LOADING_ERRORS as error:
        raise _cannot_load(what, name_or_path, error, remedy) from error


def hub_options(name_or_path: str | Path) -> dict[str, bool]:
    """Return arguments of `from_pretrained` that prevent requests to a hub that does not answer.

    Without them, the libraries try again for half a minute before they report an error.
    """
    may_ask = Path(name_or_path).exists() or is_hub_reachable()
    return {} if may_ask else {"local_files_only": True}


@cache  # a loader asks several times, and a missing answer takes seconds
def is_hub_reachable() -> bool:
    """Return whether the hub accepts connections, or whether a proxy is set that may reach it."""
    if constants.HF_HUB_OFFLINE:
        return False
    if getproxies().keys() - {"no"}:
        return True
    hub = urlsplit(constants.ENDPOINT)
    port = hub.port or (80 if hub.scheme == "http" else 443)
    try:
        socket.create_connection((hub.hostname or "", port), timeout=_SECONDS).close()
    except OSError:
        return False
    return True


def end_ids(config: GenerationConfig | None) -> list[int]:
    """Return the tokens that end a text according to a generation config; none without a config."""
    ends: Any = None if config is None else config.eos_token_id
    if ends is None:
        return []
    return list(ends) if isinstance(ends, list | tuple) else [int(ends)]


def describe_model(model: PreTrainedModel) -> str:
    """Return the name, the dtype and the number of parameters of a model."""
    path = Path(str(model.name_or_path))
    name = path.name if path.exists() else str(path)
    dtype = dtype_name(model.dtype)
    return f"{name}, {dtype}, {rounded(model.num_parameters())} parameters"


def _cannot_load(
    what: str, name_or_path: str | Path, error: Exception | str, remedy: str
) -> CheckpointError | ResourceError:
    """Return the error for a model that cannot be loaded, described by `what`."""
    name = str(name_or_path)
    if isinstance(error, Exception) and is_out_of_memory(error):
        return too_little_memory(f"{what} {name}", error)
    similar = get_close_matches(name, KNOWN_MODELS.keys() - {name}, n=1)
    return CheckpointError(
        f"cannot load {what} {name}",
        expected="a folder or hub id of a causal language model with its tokenizer",
        got=error if isinstance(error, str) else reason_of(error, name),
        remedy=f"use {similar[0]}, which `jakiro fetch` downloads" if similar else remedy,
    )


def reason_of(error: Exception, name_or_path: str | Path) -> str:
    """Return in one line why a folder or hub id could not be loaded."""
    is_missing = isinstance(error, OSError | HFValidationError) and not Path(name_or_path).exists()
    if is_missing and not is_hub_reachable():
        return "no such folder, no such model in the cache, and no connection to the hub"
    return summary_of(error)


def _refuse_other_weights(names: Collection[str], report: Mapping[str, Any], what: str) -> None:
    """Raise an error if the weights in a checkpoint are not those that its config describes.

    Weights that are missing would be random. Weights of further layers would be left out. Other
    superfluous weights, such as those of an image encoder, do no harm.
    """
    numberless = {_NUMBER.sub("#", name) for name in names}
    further = {name for name in report["unexpected_keys"] if _NUMBER.sub("#", name) in numberless}
    for kind, weights in (("missing", report["missing_keys"]), ("superfluous", further)):
        if weights:
            raise CheckpointError(
                f"the weights of {what} do not match its config",
                got=f"{len(weights)} {kind} weights, such as {min(weights)}",
                remedy="use the weights together with the config that they were saved with",
            )
