"""The inputs of a run, loaded and checked: target, data, prompts, and initial weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from inference.generation.preparation import check_length
from inference.generation.prompt_file import read_prompts
from inference.generation.prompts import Prompt, encode_prompt
from jakiro.config import JakiroConfig, config_for
from jakiro.drafter import JakiroDrafter
from jakiro.drafter_settings import DrafterSettings
from jakiro.errors import ConfigError, DataError
from jakiro.target.adapter import TargetAdapter
from jakiro.target.checks import CausalLM
from jakiro.target.record import TargetRecord, hash_weights, record_target
from jakiro.target.tail import TargetTail
from jakiro.utils import pretrained
from jakiro.utils.logs import get_logger
from jakiro.utils.settings import flattened
from training.config import TrainSettings
from training.data.packing import PackedSequences
from training.data.selection import Documents, choose_draft_ids, prompts_of, split_validation
from training.data.token_store import TokenStore, open_tokens
from training.input_settings import TargetSettings
from training.setup.adapters import adapted_names
from training.setup.initialization import check_initialization

_logger = get_logger(__name__)

_REMEDY = "check target.name_or_path"
# Settings that may differ, because they change the depth of drafting and of training, but not the
# shapes of weights.
_ANY_DEPTH: Any = {"schedule": {"autoregressive_levels"}, "trunk": {"ttt_steps"}}

_MANY_EPOCHS = 10  # a run of more epochs mostly repeats what it has learned


def load_model(settings: TargetSettings) -> PreTrainedModel:
    return pretrained.load_causal_lm(settings.name_or_path, dtype=settings.dtype, remedy=_REMEDY)


def load_tokenizer(settings: TargetSettings) -> PreTrainedTokenizerBase:
    what = "the tokenizer of the target"
    return pretrained.load_tokenizer(settings.name_or_path, what, remedy=_REMEDY)


def vocab_size_of(settings: TargetSettings, model: CausalLM | None = None) -> int:
    """Return the number of tokens in the target's vocabulary, without loading its weights."""
    if model is not None:
        return int(model.config.get_text_config().vocab_size)
    config = pretrained.load_config(settings.name_or_path, "the target", remedy=_REMEDY)
    return int(config.get_text_config().vocab_size)


def read_start(settings: TrainSettings, config: JakiroConfig) -> JakiroDrafter | None:
    """Return the drafter whose weights a new drafter starts with; None if the settings name none.

    If `draft_vocab_size` is auto, the new drafter gets the draft vocabulary of the returned one.

    The returned drafter may have been trained for a different target of the same shape, such as an
    earlier version of the target.
    """
    name = settings.initialize.drafter
    if name is None:
        return None
    start = JakiroDrafter.from_pretrained(name)
    if settings.drafter.draft_vocab_size == "auto":
        size = {"draft_vocab_size": start.config.draft_vocab_size}
        config = JakiroConfig(
            drafter=(config.drafter or {}) | size, target=config.target, record=config.record
        )
    _require_same_settings(name, start.config.settings, config.settings)
    _require_same_shapes(name, start, config)
    if start.config.target_record.fingerprint != config.target_record.fingerprint:
        _logger.warning(
            f"the drafter in {name} was made for another target, "
            f"{start.config.target_record.name_or_path}; training starts with this drafter anyway"
        )
    return start


def _require_same_settings(name: str, start: DrafterSettings, wanted: DrafterSettings) -> None:
    both = (settings.model_dump(mode="json", exclude=_ANY_DEPTH) for settings in (start, wanted))
    theirs, ours = (dict(flattened(values)) for values in both)
    for key, expected in ours.items():
        if theirs[key] != expected:
            raise ConfigError(
                f"the drafter in {name} has a different value of drafter.{key}",
                expected=str(expected),
                got=theirs[key],
            )


def _require_same_shapes(name: str, start: JakiroDrafter, config: JakiroConfig) -> None:
    with torch.device("meta"):
        wanted = {key: part.shape for key, part in JakiroDrafter(config).state_dict().items()}
    for key, part in start.state_dict().items():
        if part.shape != wanted.get(key):
            raise ConfigError(
                f"the drafter in {name} was made for a target of a different shape ({key} differs)",
                expected=wanted.get(key),
                got=part.shape,
            )


@dataclass(frozen=True)
class RunInputs:
    """The inputs of a run, loaded completely and checked against each other."""

    settings: TrainSettings
    target: TargetAdapter
    tokenizer: PreTrainedTokenizerBase
    drafter_config: JakiroConfig
    sequences: PackedSequences
    validation: PackedSequences
    prompts: Sequence[Prompt]
    data_fingerprint: str
    draft_ids: Int[Tensor, " drafted"] | None = None
    start: JakiroDrafter | None = None

    def build_drafter(self) -> JakiroDrafter:
        """Return an untrained drafter with random weights from torch's default generator."""
        drafter = JakiroDrafter(self.drafter_config)
        if self.draft_ids is not None and drafter.draft_ids is not None:
            drafter.draft_ids.copy_(self.draft_ids)
        return drafter

    @property
    def facts(self) -> dict[str, str]:
        """Properties that distinguish runs with the same settings; stored in the run folder."""
        return self.facts_with(self.start)

    def facts_with(self, start: JakiroDrafter | None) -> dict[str, str]:
        """Return the properties of a run with the same target and data, but another start."""
        facts = {
            "target_fingerprint": self.target.spec.fingerprint,
            "data_fingerprint": self.data_fingerprint,
            "sequences_filled_with": f"split {self.sequences.filled_with or 'never'}",
        }
        if start is not None:
            facts["start_fingerprint"] = hash_weights(start)
        return facts


def prepare(
    settings: TrainSettings,
    model: CausalLM | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> RunInputs:
    """Load the target and the data of a run; errors are the same as for `train`."""
    tokenizer = tokenizer or load_tokenizer(settings.target)
    store = open_store(settings, tokenizer, model)
    train, validation = split_validation(
        store, settings.data.validation_size, settings.data.fraction
    )
    target = TargetAdapter((model or load_model(settings.target)).eval().requires_grad_(False))
    settings.data.check_context(target.spec.max_position)
    split = settings.data.split
    if target.spec.is_recurrent and split != "alone":
        raise ConfigError(
            "the target's recurrent layers would read the documents of a sequence as one text",
            remedy="set data.split to alone",
        )
    record = record_target(target.spec, settings.target.name_or_path, tokenizer)
    start = _check_start(settings, target, record)
    sequences = _pack(store, train, settings)
    settings.with_steps(len(sequences))  # raises an error if the warm-up is too long
    size = settings.drafter.draft_vocab_size
    draft_ids = (
        choose_draft_ids(store, train, size, target.spec.vocab_size)
        if start is None
        else start.draft_ids
    )
    drafter = settings.drafter.model_copy(
        update={"draft_vocab_size": None if draft_ids is None else len(draft_ids)}
    )
    return RunInputs(
        settings=settings,
        target=target,
        tokenizer=tokenizer,
        drafter_config=config_for(drafter, record),
        sequences=sequences,
        validation=PackedSequences(
            store,
            validation,
            settings.data.sequence_length,
            "alone" if split == "alone" else "never",
        ),
        prompts=_prompts(settings, store, validation, target, tokenizer),
        data_fingerprint=store.fingerprint,
        draft_ids=draft_ids,
        start=start,
    )


def count_steps(settings: TrainSettings) -> TrainSettings:
    """Return the settings with the number of optimizer steps.

    The data is read, and its tokens are cached, only if the settings set `epochs`; the target's
    weights are not needed. Errors are the same as for `train`.
    """
    if settings.epochs is None:
        return settings
    store = open_store(settings, load_tokenizer(settings.target))
    train, _ = split_validation(store, settings.data.validation_size, settings.data.fraction)
    return settings.with_steps(len(_pack(store, train, settings)))


def length_of(settings: TrainSettings, num_sequences: int) -> tuple[str, bool]:
    """Return the length of a run in tokens and epochs as text, and whether it is too long.

    A run of limited time is never too long, because its number of steps is not known in advance.
    """
    num_read = settings.num_steps * settings.batch.global_batch_size
    epochs = num_read / num_sequences
    length = f"{settings.num_steps:,} steps, {num_read * settings.data.sequence_length:,} tokens "
    length += f"= {epochs:.1f} epochs"
    if settings.minutes is not None:
        return f"{settings.minutes:g} minutes of training, and at most {length}", False
    if epochs > _MANY_EPOCHS:
        return f"{length}: add data, or lower the number of steps or epochs", True
    return length, False


def open_store(
    settings: TrainSettings,
    tokenizer: PreTrainedTokenizerBase,
    model: CausalLM | None = None,
) -> TokenStore:
    """Return the tokens of a run's data; errors are the same as for `train`."""
    return open_tokens(
        settings.data.paths,
        tokenizer,
        settings.data.cache_folder,
        skip_bad_records=settings.data.skip_bad_records,
        vocab_size=vocab_size_of(settings.target, model),
    )


def check_arm(settings: TrainSettings, inputs: RunInputs) -> dict[str, str]:
    """Return what distinguishes an arm's runs; raise an error if the arm cannot be trained."""
    start = _check_start(settings, inputs.target, inputs.drafter_config.target_record)
    return inputs.facts_with(start)


def _check_start(
    settings: TrainSettings, target: TargetAdapter, record: TargetRecord
) -> JakiroDrafter | None:
    """Return the drafter to start from; raise an error if the run cannot be initialized.

    Errors come before a run folder is made, and before the first arm of a study is trained.
    """
    check_initialization(settings, target)
    if settings.drafter.tail_layers:
        TargetTail(target, settings.drafter.tail_layers)
    start = read_start(settings, config_for(settings.drafter, record))
    if start is not None and settings.lora is not None:
        adapted_names(start, settings.lora)
    return start


def _pack(store: TokenStore, documents: Documents, settings: TrainSettings) -> PackedSequences:
    data = settings.data
    sequences = PackedSequences(store, documents, data.sequence_length, data.split)
    for line in sequences.report():
        _logger.info(line)
    if not len(sequences):
        raise DataError(
            "there is nothing to train on, because no document outside the validation data has a "
            "response"
        )
    return sequences


def _prompts(
    settings: TrainSettings,
    store: TokenStore,
    validation: Documents,
    target: TargetAdapter,
    tokenizer: PreTrainedTokenizerBase,
) -> list[Prompt]:
    evaluation, longest = settings.evaluation, target.spec.max_position
    if evaluation.prompts is None:
        return prompts_of(
            store,
            validation,
            prompt_tokens=evaluation.prompt_tokens,
            longest=longest - evaluation.max_new_tokens,
            count=evaluation.num_prompts,
        )
    read = read_prompts(evaluation.prompts, evaluation.num_prompts, training_records=True)
    prompts = [prompt.first for prompt in read]
    for number, prompt in enumerate(prompts, start=1):  # checked now, not at the first evaluation
        length = len(encode_prompt(prompt, tokenizer, target.spec.vocab_size))
        check_length(length, length + evaluation.max_new_tokens, longest, number)
    return prompts
