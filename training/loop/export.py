"""Export of a run's drafters, with records of their training and model cards (README.md)."""

import shutil
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import ModelCard, ModelCardData

from jakiro.config import JakiroConfig
from jakiro.drafter import JakiroDrafter
from jakiro.utils.devices import processor
from jakiro.utils.files import publish, write_atomically
from jakiro.utils.logs import get_logger
from jakiro.utils.provenance import provenance
from training.data.sources import is_local
from training.evaluation import summary_of
from training.loop.checkpoint import RunState
from training.loop.run_folder import RunFolder, record_of
from training.processes import Processes
from training.setup.adapters import save_adapters
from training.setup.preparation import RunInputs

_logger = get_logger(__name__)

_ADAPTER = "adapter"  # folder, in `best`, of adapters that are separate from the weights


class Exporter:
    """Writes drafters with a record of their training; only the first process writes files."""

    def __init__(self, inputs: RunInputs, folder: RunFolder, processes: Processes) -> None:
        self._inputs = inputs
        self._settings = inputs.settings
        self._folder = folder
        self._processes = processes

    def keep_best(
        self,
        drafter: JakiroDrafter,
        trained: JakiroDrafter,
        evaluation: Mapping[str, Any],
        state: RunState,
    ) -> None:
        """Export the best drafter so far to `best`, unless `checkpoint.keep_best` is false."""
        if not self._settings.checkpoint.keep_best:
            return
        drafter.config.record = self._record(evaluation, state)
        with self._processes.together():
            if self._processes.is_first:
                self._replace_best(self._save(drafter, trained))

    def finish(
        self,
        drafter: JakiroDrafter,
        trained: JakiroDrafter,
        evaluation: Mapping[str, Any],
        state: RunState,
    ) -> None:
        """Write the finished drafter and, if it has adapters, the adapters separately.

        The finished drafter is the one in `best` if it is better on held-out data than the last
        drafter, and kept. Otherwise, it is the last drafter.
        """
        drafter.config.record = self._record(evaluation, state)
        with self._processes.together():
            if not self._processes.is_first:
                return
            if self._finishes_with_best(state):
                partial = shutil.copytree(self._folder.best, self._new_partial())
            else:
                partial = self._save(drafter, trained)
            if (partial / _ADAPTER).exists():
                # An earlier attempt may have left adapters.
                shutil.rmtree(self._folder.adapter, ignore_errors=True)
                publish(partial / _ADAPTER, self._folder.adapter)
            publish(partial, self._folder.drafter)
            _logger.info(self._summary(evaluation, state))

    def _save(self, drafter: JakiroDrafter, trained: JakiroDrafter) -> Path:
        partial = self._new_partial()
        drafter.save_pretrained(partial)
        self._inputs.tokenizer.save_pretrained(partial)
        config: Any = drafter.config
        write_atomically(partial / "README.md", model_card(config))
        if self._settings.lora is not None:
            save_adapters(trained, partial / _ADAPTER, str(self._settings.initialize.drafter))
        return partial

    def _new_partial(self) -> Path:
        partial = self._folder.path / ".drafter.partial"
        shutil.rmtree(partial, ignore_errors=True)  # it may be left from an earlier attempt
        return partial

    def _replace_best(self, partial: Path) -> None:
        folder = self._folder.path / f".best-{uuid.uuid4().hex}"
        publish(partial, folder)
        # Renaming cannot replace a folder that is not empty, but it can replace a link.
        link = self._folder.path / ".best.partial"
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name)
        link.replace(self._folder.best)
        for other in self._folder.path.glob(".best-*"):
            if other != folder:
                shutil.rmtree(other)

    def _finishes_with_best(self, state: RunState) -> bool:
        """Return whether an earlier drafter that is better on held-out data is to be written."""
        kept = self._folder.best_state
        if not self._settings.checkpoint.keep_best or kept is None:
            return False
        is_same = (kept["best_metric"], kept["best_step"]) == (state.best_metric, state.best_step)
        # Tau is measured on too few positions for that.
        return is_same and state.best_metric != "tau" and state.best_step != state.step

    def _summary(self, evaluation: Mapping[str, Any], state: RunState) -> str:
        last = summary_of(evaluation) or "nothing was measured on held-out data"
        last = f"the last drafter, after {state.step} steps ({last})"
        if not self._finishes_with_best(state):
            return f"{self._folder.drafter}: {last}"
        best = summary_of(record_of(self._folder.best)["evaluation"])
        return (
            f"{self._folder.drafter}: the best drafter of the run, after {state.best_step} steps "
            f"({best}); not {last}"
        )

    def _record(self, evaluation: Mapping[str, Any], state: RunState) -> dict[str, Any]:
        device = self._processes.device
        is_cuda = device.type == "cuda"
        hardware = torch.cuda.get_device_name(device) if is_cuda else processor()
        return {
            "provenance": provenance() | {"hardware": hardware},
            "settings": self._settings.model_dump(mode="json"),
            "training": asdict(state),
            "evaluation": dict(evaluation),
        }


_CARD = """\
---
{{ card_data }}
---

# A drafter for {{ target }}

This drafter proposes next tokens for {{ target }}, which verifies them. The generated text, or its
distribution when tokens are sampled, is the same as that of the target alone. The drafter cannot be
used without this target.

## How to use

```{{ language }}
{{ use }}
```

## Measurements

{% if decoding -%}
{{ decoding[0].prompts }} prompts ({{ prompts }}), with draft trees of the trained depth.
Tau is the number of tokens per forward pass of the target; without a drafter, it is 1.

| temperature | tau | acceptance at depth 1, 2, ... | tokens |
|---|---|---|---|
{% for result in decoding -%}
| {{ "{:g}".format(result.temperature) }} | {{ "{:.2f}".format(result.tau) }} |
{%- for share in result.conditional_acceptance_rate %}
{{- "," if not loop.first }} {{ "{:.2f}".format(share) }}
{%- endfor %} | {{ result.tokens }} |
{% endfor %}
{%- else -%}
Tau was not measured.
{% endif %}
{% if validation -%}
In {{ "{:.1%}".format(validation.levels[0].agreement) }} of {{ validation.positions }} drafts on
held-out text, the drafter and the target agree on the most likely next token.

{% if validation.accept_rate -%}
Acceptance on held-out text at temperature 1, by position behind the last verified token, if the
drafts before are accepted:
{%- for share in validation.accept_rate %}
{{- "," if not loop.first }} {{ "{:.2f}".format(share) }}
{%- endfor %}
{{- " (%.2f tokens per step of a chain)" % validation.tau_probabilistic
    if validation.tau_probabilistic }}.

{% endif -%}
{% endif -%}
Speed was not measured; `jakiro bench` measures it.

## Training

{{ training.step }} optimizer steps over {{ "{:,}".format(training.tokens) }} tokens of {{ data }}
{{- ", from the weights of the drafter " ~ start if start }}
{{- "; only adapters were trained, then merged" if settings.lora }}.

```yaml
{{ shown }}
```

Jakiro, {{ "unknown commit" if not provenance.git else "commit " ~ provenance.git.sha }}
{{- " with local changes" if provenance.git and provenance.git.is_dirty }}, on
{{ provenance.time }}; {% for name, version in provenance.versions.items() -%}
{{ name }} {{ version }}{{ ", " if not loop.last else "." }}
{%- endfor %}
{% if provenance.hardware %}Hardware: {{ provenance.hardware }}. {% endif -%}
The command is `jakiro train` with the settings above.
"""
_USE = """\
from jakiro import SpeculativeDecoder
# On a GPU, also pass device_map="cuda".
decoder = SpeculativeDecoder.from_pretrained("folder or hub id of this drafter")
print(decoder.generate("def main(", max_new_tokens=128).text)"""
_SETTINGS = (
    *("drafter", "lora", "objective", "optimizer", "batch", "engine"),
    *("steps", "epochs", "minutes", "seed"),
)


def model_card(config: JakiroConfig, engine: str | None = None) -> str:
    """Return the model card of a trained drafter, written from the record in the drafter's config.

    Only the last part of a local path is shown, because the card is meant to be published.
    """
    record = config.record or {}
    settings, evaluation = record["settings"], record["evaluation"]
    target, paths = config.target_record.name_or_path, settings["data"]["paths"]
    prompts, start = settings["evaluation"]["prompts"], settings["initialize"]["drafter"]
    shown = {name: settings[name] for name in _SETTINGS if settings[name] is not None}
    card = ModelCard.from_template(
        ModelCardData(
            base_model=None if is_local(target) else target,
            library_name="jakiro",
            tags=["speculative-decoding", "drafter", "jakiro"],
            datasets=[path.partition(":")[0] for path in paths if not is_local(path)] or None,
        ),
        template_str=_CARD,
        target=_quoted(target),
        language="python" if engine is None else "bash",
        use=engine or _USE,
        data=", ".join(map(_quoted, paths)),
        prompts=f"from {_quoted(prompts)}" if prompts else "the starts of held-out records",
        start=_quoted(start) if start else None,
        shown=yaml.safe_dump(shown, sort_keys=False).strip(),
        decoding=evaluation.get("decoding"),
        validation=evaluation.get("validation"),
        settings=settings,
        training=record["training"],
        provenance=record["provenance"],
    )
    return f"{str(card).rstrip()}\n"


def _quoted(name: str) -> str:
    return f"`{Path(name).name if is_local(name) else name}`"
