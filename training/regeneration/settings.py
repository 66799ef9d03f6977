"""How the target answers, and what makes one file of answers another than the next."""

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from inference.decoder import SpeculativeDecoder
from inference.drafters.combined import CombinedDrafter
from inference.drafters.small_lm import SmallLMDrafter
from inference.drafters.trained import TrainedDrafter
from inference.prompts import needed
from inference.protocol import Drafter
from jakiro.settings import Settings
from jakiro.target_record import hash_weights, template_fingerprint, tokenizer_fingerprint
from training.data.sources import Source


class RegenerationSettings(Settings):
    """How the target answers.

    Attributes:
        temperature: 0 is greedy; other fields of the law are those of the target's own generation
            config.
        max_new_tokens: longest answer.
        prompt_tokens: start of a text that is continued.
        seed: of all draws; those of an answer depend on it, the row and the turn alone.
        batch_size: rows answered together; it decides speed and memory.
        skip_bad_rows: leave out rows that cannot be used; by default the first one ends the run.
    """

    temperature: float = Field(0.0, ge=0)
    max_new_tokens: int = Field(512, ge=1)
    prompt_tokens: int = Field(64, ge=1)
    seed: int = Field(0, ge=0)
    batch_size: int = Field(8, ge=1)
    skip_bad_rows: bool = False


def identify(
    decoder: SpeculativeDecoder, settings: RegenerationSettings, sources: Sequence[Source]
) -> dict[str, Any]:
    """Return what decides the rows; reads all of the target's weights.

    Args:
        decoder: of the target, with its tokenizer.
        settings: how it answers.
        sources: of the data.
    """
    target, tokenizer = decoder.target, needed(decoder.tokenizer)
    facts: dict[str, Any] = {
        # Before the weights, which are others in another one.
        "target_dtype": str(target.dtype).removeprefix("torch."),
        "target_weights": hash_weights(target.model),
        "generation_config": _law_of(target.model.generation_config),
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "template": template_fingerprint(tokenizer),
        "data": [source.fingerprint() for source in sources],
        **settings.model_dump(exclude={"batch_size", "seed"}),
    }
    if settings.temperature:  # only then is anything drawn
        facts["seed"] = settings.seed
        facts["drafter"] = _version_of(decoder.drafter)
    return facts


def _version_of(drafter: Drafter | None) -> str | None:
    match drafter:
        case TrainedDrafter():
            return hash_weights(drafter.model)
        case SmallLMDrafter():
            return hash_weights(drafter.model.model)
        case CombinedDrafter():
            return f"{_version_of(drafter.first)}, {_version_of(drafter.second)}"
    return None if drafter is None else drafter.version


def _law_of(config: Any) -> dict[str, Any]:
    known = {} if config is None else config.to_diff_dict()
    return {name: value for name, value in known.items() if name != "transformers_version"}
