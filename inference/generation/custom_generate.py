"""Takes a request over from `target.generate(..., custom_generate=decoder)`."""

from collections import Counter
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, TypeVar

from jaxtyping import Int
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
)

from inference.engine.request import Request
from inference.generation.preparation import (
    Prepared,
    capture,
    prepare,
    random_seed,
    share_processors,
)
from inference.generation.prompts import check_ids, unpadded
from inference.generation.unsupported import refuse_several
from inference.sampling import PREFIX_FREE
from jakiro.errors import PromptError, TargetMismatch
from jakiro.target.adapter import TargetAdapter
from jakiro.target.checks import CausalLM

T = TypeVar("T")

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
            PromptError: the model's other inputs or the config cannot be honoured, or the prompt
                holds ids that may be embedded and never follow.
            TargetMismatch: the model is not the decoder's target.
        """
        self._check(target, inputs)
        rows = unpadded(self.input_ids, self.attention_mask)
        for row in rows:
            check_ids(row, target.spec.vocab_size)
        self._check_positions(inputs.get("position_ids"), rows)
        refuse_several(len(rows), self.processors)
        key = random_seed() if seed is None else seed
        limit = target.spec.max_position
        each = self._each(rows)
        return share_processors([one.request(key, limit, n) for n, one in enumerate(each)])

    def _each(self, rows: list[list[int]]) -> list[Prepared]:
        """Return what is prepared for every row.

        Processors and criteria that count tokens would count padding, and some know their row: then
        every row is prepared anew, alone, with those that the caller passed.
        """
        is_padded = any(len(row) != self.input_ids.shape[1] for row in rows)
        are_alike = len(rows) == 1 or all(type(one) in PREFIX_FREE for one in self.processors)
        if not is_padded and are_alike:
            whole = Prepared(self.input_ids, self.processors, self.criteria, self.config)
            return [whole] * len(rows)
        config = copy(self.config)
        config.max_new_tokens = int(self.config.max_length) - self.input_ids.shape[1]
        config.max_length = None
        config.num_return_sequences = 1  # the rows are there already
        built = capture(self.model, self.input_ids, self.attention_mask, generation_config=config)
        given: dict[str, Any] = {
            "logits_processor": LogitsProcessorList(_others(self.processors, built.processors)),
            "stopping_criteria": StoppingCriteriaList(_others(self.criteria, built.criteria)),
        }
        return [prepare(self.model, row, generation_config=config, **given) for row in rows]

    def _check_positions(self, positions: Tensor | None, rows: list[list[int]]) -> None:
        """Refuse positions that do not count each row's own tokens."""
        if positions is None:
            return
        for row, own in zip(rows, positions.expand(len(rows), -1).tolist(), strict=True):
            if sorted(own)[-len(row) :] != list(range(len(row))):
                raise PromptError(
                    "position_ids cannot be honoured",
                    expected="positions that count each prompt's tokens from 0",
                    got=own,
                    remedy="leave them out",
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


def _others(handed: Iterable[T], built: Iterable[T]) -> list[T]:
    """Return what the caller passed: what was handed over and not built from the config."""
    left = Counter(_description(one) for one in built)
    others = []
    for one in handed:
        if left[_description(one)] > 0:
            left[_description(one)] -= 1
        else:
            others.append(one)
    return others


def _description(one: object) -> str:
    return f"{type(one)} {sorted(vars(one).items(), key=str)}"
