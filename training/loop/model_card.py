"""The model card (README.md) of a drafter: purpose, use, measurements, and training."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

from jakiro.config import JakiroConfig
from training.data.sources import is_local

_SETTINGS = (
    *("drafter", "lora", "objective", "optimizer", "batch", "engine"),
    *("steps", "epochs", "minutes", "seed"),
)


def model_card(config: JakiroConfig) -> str:
    """Return the model card of a trained drafter, written from the record in the drafter's config.

    Only the last part of a local path is shown, because the card is meant to be published.
    """
    record = config.record or {}
    settings = record["settings"]
    target, paths = config.target_record.name_or_path, settings["data"]["paths"]
    data = ModelCardData(
        base_model=None if is_local(target) else target,
        library_name="jakiro",
        tags=["speculative-decoding", "drafter", "jakiro"],
        datasets=[path.partition(":")[0] for path in paths if not is_local(path)] or None,
    )
    parts = (
        f"# A drafter for {_called(target)}",
        _purpose(target),
        _use(),
        "## Measurements",
        *_measured(record["evaluation"], settings),
        "## Training",
        *_training(record["training"], settings),
        "## Versions",
        _origin(record["provenance"]),
    )
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n"))


def _purpose(target: str) -> str:
    return (
        f"This drafter proposes next tokens for {_called(target)}, which verifies them. The "
        "generated text, or its distribution when tokens are sampled, is the same as that of the "
        "target alone. The drafter cannot be used without this target."
    )


def _use() -> str:
    return """## How to use

```python
from jakiro import SpeculativeDecoder
# On a GPU, also pass device_map="cuda".
decoder = SpeculativeDecoder.from_pretrained("folder or hub id of this drafter")
print(decoder.generate("def main(", max_new_tokens=128).text)
```"""


def _measured(evaluation: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterable[str]:
    decoding = evaluation.get("decoding", [])
    if decoding:
        yield _decoded(decoding[0], settings["evaluation"])
        yield _table(decoding)
    else:
        yield "Tau was not measured, because no prompts were decoded."
    validation = evaluation.get("validation")
    if validation:
        share = validation["levels"][0]["agreement"]
        yield (
            f"In {share:.1%} of {validation['positions']} drafts on held-out text, at the "
            "distances from the last verified token that occur in decoding, the drafter and the "
            "target agree on the most likely next token."
        )
    yield (
        "Not measured here: speed (which `jakiro bench` measures), other prompts, longer answers, "
        "other temperatures, and the variation between training runs with different seeds."
    )


def _decoded(result: Mapping[str, Any], evaluation: Mapping[str, Any]) -> str:
    prompts = evaluation["prompts"]
    source = "the starts of held-out records" if prompts is None else f"from {_called(prompts)}"
    return (
        f"{result['prompts']} prompts ({source}) were continued by up to "
        f"{evaluation['max_new_tokens']} tokens each, with draft trees of as many levels as in "
        "training. "
        "Tau is the mean acceptance length, that is, the number of tokens per forward pass of the "
        "target. Without a drafter, tau is 1."
    )


def _table(decoding: Iterable[Mapping[str, Any]]) -> str:
    rows = [
        f"| {result['temperature']:g} | {result['tau']:.2f} "
        f"| {', '.join(f'{share:.2f}' for share in result['conditional_acceptance_rate'])} "
        f"| {result['tokens']} |"
        for result in decoding
    ]
    head = ("| temperature | tau | acceptance at depth 1, 2, ... | tokens |", "|---|---|---|---|")
    return "\n".join((*head, *rows))


def _training(state: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterable[str]:
    data = ", ".join(map(_called, settings["data"]["paths"]))
    yield (
        f"{state['step']} optimizer steps over {state['tokens']:,} tokens of {data}; a token that "
        "was read in several epochs is counted once per epoch. "
        f"{settings['data']['validation_size']} records were held out of training."
    )
    start = settings["initialize"]["drafter"]
    if start is not None:
        added = "" if settings["lora"] is None else "; only adapters were trained, then merged"
        yield f"Training started with the weights of the drafter {_called(start)}{added}."
    shown = {name: settings[name] for name in _SETTINGS if settings[name] is not None}
    yield f"```yaml\n{yaml.safe_dump(shown, sort_keys=False).strip()}\n```"


def _origin(provenance: Mapping[str, Any]) -> str:
    git = provenance["git"]
    commit = "unknown commit"
    if git is not None:
        commit = f"commit {git['sha']}" + (" with local changes" if git["is_dirty"] else "")
    versions = ", ".join(f"{name} {value}" for name, value in provenance["versions"].items())
    return f"Jakiro, {commit}, on {provenance['time']}; {versions}."


def _called(name: str) -> str:
    return f"`{Path(name).name if is_local(name) else name}`"
