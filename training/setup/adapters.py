"""Low-rank adapters of a drafter (LoRA, arXiv 2106.09685), which PEFT adds, merges, and saves.

Adapters are separate from the weights only during training. They are merged into the weights before
a drafter is evaluated or exported, because drafting reads slices of the weights without adapters.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import nn

from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError
from training.input_settings import LoraSettings

# Prefix of the weights' names in PEFT's files: the path to the adapted model.
_PREFIX = "base_model.model."
_STACKED = 3  # number of axes of a stack of matrices, such as one matrix for each expert


def add_adapters(drafter: JakiroDrafter, settings: LoraSettings, seed: int = 0) -> None:
    """Freeze a drafter's weights, and add adapters that do not change its output yet."""
    linears, stacks = adaptable(drafter)
    names = adapted_names(drafter, settings)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=[name for name in linears if name in names],
        target_parameters=[name for name in stacks if name in names],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # the same adapters on every process
        inject_adapter_in_model(config, drafter)


def adaptable(drafter: JakiroDrafter) -> tuple[list[str], list[str]]:
    """Return the names of linear layers and of stacks of matrices; both can have adapters."""
    linears = [name for name, part in drafter.named_modules() if isinstance(part, nn.Linear)]
    stacks = [name for name, part in drafter.named_parameters() if part.ndim == _STACKED]
    return linears, stacks


def merged(drafter: JakiroDrafter) -> JakiroDrafter:
    """Return a drafter with its adapters merged into its weights.

    A drafter without adapters is returned unchanged. If there are adapters, a new drafter is
    returned, and of the given drafter, only the adapters can be used afterwards.
    """
    source: Any = drafter
    layers = [layer for layer in drafter.modules() if isinstance(layer, LoraLayer)]
    if not layers:
        return drafter
    for layer in layers:
        layer.merge()
    whole: Any = JakiroDrafter(source.config)
    whole.load_state_dict(
        {
            name.replace("base_layer.", ""): part
            for name, part in drafter.state_dict().items()
            if "lora_" not in name
        }
    )
    return whole


def save_adapters(drafter: JakiroDrafter, folder: Path, base: str) -> None:
    """Write the adapters of a drafter in PEFT's format, for `peft.PeftModel.from_pretrained`."""
    configs: Any = drafter.peft_config
    (config,) = configs.values()
    folder.mkdir(parents=True, exist_ok=True)
    replace(config, base_model_name_or_path=base, inference_mode=True).save_pretrained(str(folder))
    weights = get_peft_model_state_dict(drafter)
    whole = {f"{_PREFIX}{name}": part.cpu().contiguous() for name, part in weights.items()}
    save_file(whole, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def adapted_names(drafter: JakiroDrafter, settings: LoraSettings) -> set[str]:
    all_names = [name for kind in adaptable(drafter) for name in kind]
    if settings.targets is None:
        return {name for name in all_names if not name.endswith("router")}
    adapted: set[str] = set()
    for target in settings.targets:
        names = {name for name in all_names if f".{name}".endswith(f".{target}")}
        if not names:
            raise ConfigError(
                "lora.targets names a layer that the drafter does not have",
                expected=f"one of these names, or the end of one of them: {', '.join(all_names)}",
                got=target,
            )
        adapted |= names
    return adapted
