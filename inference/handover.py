"""Takes a request over from `target.generate(..., custom_generate=decoder)`."""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Int
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
)

from inference.limits import refuse_several
from inference.preparation import Prepared, drawn_seed, prepare, share_processors
from inference.prompts import unpadded
from inference.request import Request
from jakiro.errors import PromptError, TargetMismatch
from jakiro.target import TargetAdapter
from jakiro.target_checks import CausalLM

# What generate() always hands over, and the decode loop has its own of.
_EXPECTED = frozenset(
    {"logits_to_keep", "past_key_values", "position_ids", "synced_gpus", "use_cache"}
)


@dataclass(frozen=True)
class Handover:
    """What `generate()` passes to a decoding method."""

    model: CausalLM
    input_ids: Int[Tensor, "batch width"]
    attention_mask: Int[Tensor, "batch width"] | None
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig

    @property
    def pad_token_id(self) -> int:
        """What fills sequences that end early."""
        pad: Any = self.config.pad_token_id
        if pad is None:
            eos: Any = self.config.eos_token_id
            pad = eos[0] if isinstance(eos, list) else eos
        return 0 if pad is None else int(pad)

    def requests(
        self, target: TargetAdapter, seed: int | None, inputs: Mapping[str, Any]
    ) -> list[Request]:
        """Return one request per row.

        Args:
            target: of the decoder.
            seed: key of every random number, or None to draw one.
            inputs: what else goes into the model.

        Raises:
            PromptError: the model's other inputs or the config cannot be honoured.
            TargetMismatch: the model is not the decoder's target.
        """
        self._check(target, inputs)
        refuse_several(len(self.input_ids), self.processors)
        key = drawn_seed() if seed is None else seed
        limit = target.spec.max_position
        rows = unpadded(self.input_ids, self.attention_mask)
        width = self.input_ids.shape[1]
        if all(len(row) == width for row in rows):
            whole = Prepared(self.input_ids, self.processors, self.criteria, self.config)
            each = [whole.request(key, limit, index) for index in range(len(rows))]
        else:
            each = [self._alone(row, width).request(key, limit, n) for n, row in enumerate(rows)]
        return share_processors(each)

    def _alone(self, token_ids: list[int], width: int) -> Prepared:
        """Return what `generate()` would prepare for one row without its padding.

        Processors and criteria that count tokens would count padding, so those of the config are
        made anew; those that the caller passed are kept.
        """
        config = copy(self.config)
        config.max_new_tokens = int(self.config.max_length) - width
        config.max_length = None
        own = prepare(self.model, token_ids, generation_config=config)
        made = {type(one) for one in [*own.processors, *own.criteria]}
        processors = [one for one in self.processors if type(one) not in made]
        criteria = [one for one in self.criteria if type(one) not in made]
        return replace(
            own,
            processors=LogitsProcessorList([*own.processors, *processors]),
            criteria=StoppingCriteriaList([*own.criteria, *criteria]),
        )

    def _check(self, target: TargetAdapter, inputs: Mapping[str, Any]) -> None:
        if self.model.get_input_embeddings() is not target.model.get_input_embeddings():
            raise TargetMismatch(
                "generate() was called on another model than the decoder's target",
                expected=type(target.model).__name__,
                got=type(self.model).__name__,
                remedy="call generate() of the model that the decoder was made with",
            )
        others = {name for name, value in inputs.items() if value is not None} - _EXPECTED
        if inputs.get("synced_gpus"):
            others.add("synced_gpus")
        if others:
            raise PromptError(
                "inputs that cannot be honoured",
                expected="input_ids and attention_mask",
                got=", ".join(sorted(others)),
                remedy="leave them out",
            )
