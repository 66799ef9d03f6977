"""Low-rank adapters of a drafter (LoRA, arXiv 2106.09685) by PEFT: added, merged, and saved.

Only training sees weights and adapters side by side. What is evaluated and exported is merged:
drafting reads slices of weights, which know nothing of what stands beside them.
"""

from collections.abc import Iterable
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

# What PEFT's own model calls the one that it holds, in the names of its files' weights.
_PREFIX = "base_model.model."
_STACKED = 3  # axes of a stack of matrices; PEFT adapts no others


def add_adapters(drafter: JakiroDrafter, settings: LoraSettings, seed: int = 0) -> None:
    """Freeze a drafter's weights and put adapters beside them that change nothing yet.

    Raises:
        ConfigError: there is nothing of a name in `targets`.
    """
    linears, stacks = adaptable(drafter)
    names = _chosen((*linears, *stacks), settings.targets)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=[name for name in linears if name in names],
        target_parameters=[name for name in stacks if name in names],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # the same adapters on every process
        inject_adapter_in_model(config, drafter)


def check_adapters(drafter: JakiroDrafter, settings: LoraSettings) -> None:
    """Refuse adapters of what a drafter does not have.

    Raises:
        ConfigError: there is nothing of a name in `targets`.
    """
    _chosen([name for kind in adaptable(drafter) for name in kind], settings.targets)


def adaptable(drafter: JakiroDrafter) -> tuple[list[str], list[str]]:
    """Return the names of what can have adapters: linear layers, and stacks of matrices."""
    linears = [name for name, part in drafter.named_modules() if isinstance(part, nn.Linear)]
    stacks = [name for name, part in drafter.named_parameters() if part.ndim == _STACKED]
    return linears, stacks


def merged(drafter: JakiroDrafter) -> JakiroDrafter:
    """Return a drafter whose weights have its adapters in them; one without adapters as it is.

    The one that is given is used up.
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
    """Write the adapters of a drafter in PEFT's format, for `peft.PeftModel.from_pretrained`.

    Args:
        drafter: with adapters that are not merged.
        folder: created if missing.
        base: folder or hub id of the drafter that they belong to.
    """
    configs: Any = drafter.peft_config
    (config,) = configs.values()
    folder.mkdir(parents=True, exist_ok=True)
    replace(config, base_model_name_or_path=base, inference_mode=True).save_pretrained(str(folder))
    weights = get_peft_model_state_dict(drafter)
    whole = {f"{_PREFIX}{name}": part.cpu().contiguous() for name, part in weights.items()}
    save_file(whole, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _chosen(known: Iterable[str], targets: Iterable[str] | None) -> set[str]:
    known = list(known)
    if targets is None:
        return {name for name in known if not name.endswith("router")}
    chosen: set[str] = set()
    for target in targets:
        found = {name for name in known if f".{name}".endswith(f".{target}")}
        if not found:
            raise ConfigError(
                "lora.targets names what the drafter does not have",
                expected=f"names, or their ends, out of {', '.join(known)}",
                got=target,
            )
        chosen |= found
    return chosen
