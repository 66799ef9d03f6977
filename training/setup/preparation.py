"""The inputs of a run: what can go wrong with target, data and prompts goes wrong here."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from inference.generation.prompts import Prompt, encode_prompt
from inference.generation.unsupported import check_length
from jakiro.config import JakiroConfig, config_for
from jakiro.drafter import JakiroDrafter
from jakiro.errors import DataError
from jakiro.target.adapter import TargetAdapter
from jakiro.target.checks import CausalLM
from jakiro.target.record import record_target
from jakiro.target.tail import TargetTail
from training.config import TrainSettings
from training.data.counts import DataCounts
from training.data.draft_vocabulary import choose_draft_ids
from training.data.packing import PackedRows
from training.data.report import report
from training.data.token_store import TokenStore, open_tokens
from training.data.held_out import Documents, choose_held_out, prompts_of, read_prompts
from training.setup.adapters import check_adapters
from training.setup.initialization import check_initialization
from training.setup.loading import load_model, load_tokenizer, vocab_size_of
from training.setup.warm_start import read_start, weights_fingerprint


@dataclass(frozen=True)
class Prepared:
    """A run whose inputs are all there and fit together.

    Attributes:
        settings: of the run.
        target: the frozen target.
        tokenizer: the target's.
        drafter_config: of the drafter to be trained.
        rows: to train on.
        held_out: rows of the documents kept out of training.
        prompts: to be continued when the drafter is evaluated.
        data_fingerprint: of data and tokenizer.
        draft_ids: the tokens that the drafter drafts; None for all.
        start: another drafter, at whose weights this one starts; None if it does not.
    """

    settings: TrainSettings
    target: TargetAdapter
    tokenizer: PreTrainedTokenizerBase
    drafter_config: JakiroConfig
    rows: PackedRows
    held_out: PackedRows
    prompts: Sequence[Prompt]
    data_fingerprint: str
    draft_ids: Int[Tensor, " drafted"] | None = None
    start: JakiroDrafter | None = None

    def build_drafter(self) -> JakiroDrafter:
        """Return an untrained drafter; its weights are drawn from torch's own generator."""
        drafter = JakiroDrafter(self.drafter_config)
        if self.draft_ids is not None and drafter.draft_ids is not None:
            drafter.draft_ids.copy_(self.draft_ids)
        return drafter

    @property
    def facts(self) -> dict[str, str]:
        """What tells runs of equal settings apart."""
        facts = {
            "target_fingerprint": self.target.spec.fingerprint,
            "data_fingerprint": self.data_fingerprint,
            "rows_filled_with": f"split {self.rows.counts.filled_with or 'never'}",
        }
        if self.start is not None:
            facts["start_fingerprint"] = weights_fingerprint(self.start)
        return facts


def prepare(
    settings: TrainSettings,
    model: CausalLM | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Prepared:
    """Load the target and the data of a run; arguments and errors are those of `train`."""
    tokenizer = tokenizer or load_tokenizer(settings.target)
    store = open_store(settings, tokenizer, model)
    train, held_out = choose_held_out(store, settings.data.validation_size, settings.data.fraction)
    target = TargetAdapter((model or load_model(settings.target)).eval().requires_grad_(False))
    settings.data.check_context(target.spec.max_position)
    check_initialization(settings, target)
    check_tail(settings, target)
    record = record_target(target.spec, settings.target.name_or_path, tokenizer)
    config = config_for(settings.drafter, record)
    start = _start(settings, config)
    return Prepared(
        settings=settings,
        target=target,
        tokenizer=tokenizer,
        drafter_config=config,
        rows=_pack(store, train, settings),
        held_out=PackedRows(store, held_out, settings.data.sequence_length),
        prompts=_prompts(settings, store, held_out, target, tokenizer),
        data_fingerprint=store.fingerprint,
        draft_ids=_draft_ids(settings, store, train, target, start),
        start=start,
    )


def open_store(
    settings: TrainSettings,
    tokenizer: PreTrainedTokenizerBase,
    model: CausalLM | None = None,
) -> TokenStore:
    """Return the tokens of a run's data; arguments and errors are those of `train`."""
    return open_tokens(
        settings.data.paths,
        tokenizer,
        settings.data.cache_folder,
        skip_bad_rows=settings.data.skip_bad_rows,
        vocab_size=vocab_size_of(settings.target, model),
    )


def check_arm(settings: TrainSettings, inputs: Prepared) -> None:
    """Refuse another drafter, for the same target and data, that cannot be trained.

    Raises:
        ConfigError: it cannot start as it is told to.
        TargetNotSupported: it needs the target's last layers, which cannot be had alone.
        DataError: it wants to draft more tokens than there are.
    """
    check_initialization(settings, inputs.target)
    start = _start(settings, config_for(settings.drafter, inputs.drafter_config.target_record))
    check_tail(settings, inputs.target)
    store = inputs.rows.store
    train, _ = choose_held_out(store, settings.data.validation_size, settings.data.fraction)
    _draft_ids(settings, store, train, inputs.target, start)


def check_tail(settings: TrainSettings, target: TargetAdapter) -> None:
    """Refuse a target whose last layers are wanted, but cannot be had alone.

    Raises:
        TargetNotSupported: as `TargetTail`.
    """
    if settings.drafter.tail_layers:
        TargetTail(target, settings.drafter.tail_layers)


def _start(settings: TrainSettings, config: JakiroConfig) -> JakiroDrafter | None:
    start = read_start(settings, config)
    if start is not None and settings.lora is not None:
        check_adapters(start, settings.lora)
    return start


def _draft_ids(
    settings: TrainSettings,
    store: TokenStore,
    train: Documents,
    target: TargetAdapter,
    start: JakiroDrafter | None,
) -> Tensor | None:
    """Return the tokens to draft; with the weights of another drafter come those that it drafts."""
    if start is not None:
        return start.draft_ids
    size = settings.drafter.draft_vocab_size
    return None if size is None else choose_draft_ids(store, train, size, target.spec.vocab_size)


def _pack(store: TokenStore, documents: Documents, settings: TrainSettings) -> PackedRows:
    rows = PackedRows(store, documents, settings.data.sequence_length, settings.data.split)
    if store.counts is not None:
        report(DataCounts(read=store.counts, packed=rows.counts))
    if not len(rows):
        raise DataError(
            "there is nothing to train on",
            expected="response tokens outside of the held-out rows of data",
            got="none",
            remedy="add data, or lower data.validation_size",
        )
    return rows


def _prompts(
    settings: TrainSettings,
    store: TokenStore,
    held_out: Documents,
    target: TargetAdapter,
    tokenizer: PreTrainedTokenizerBase,
) -> list[Prompt]:
    evaluation, longest = settings.evaluation, target.spec.max_position
    if evaluation.prompts is None:
        return prompts_of(
            store,
            held_out,
            prompt_tokens=evaluation.prompt_tokens,
            longest=longest - evaluation.max_new_tokens,
            count=evaluation.num_prompts,
        )
    prompts = read_prompts(evaluation.prompts, evaluation.num_prompts)
    for number, prompt in enumerate(prompts, start=1):  # now, for they are decoded late
        length = len(encode_prompt(prompt, tokenizer, target.spec.vocab_size))
        check_length(length, length + evaluation.max_new_tokens, longest, number)
    return prompts
