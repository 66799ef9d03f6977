"""Export of a drafter for a device that does not have the target: `jakiro export --to device`."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError
from jakiro.target.adapter import TargetAdapter
from jakiro.target.device_target import EmbeddingForm, write_device_target
from jakiro.target.record import check_target, check_tokenizer
from jakiro.utils.files import written_folder


def export_device(
    drafter: JakiroDrafter,
    target: TargetAdapter,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    embedding: EmbeddingForm = "int8",
) -> None:
    """Write all that a device needs to draft: the folder appears in full or not at all."""
    settings = drafter.config.settings
    if settings.tail_layers:
        raise ConfigError(
            "this drafter computes with the target's last layers, which a device does not have",
            expected="a drafter without tail_layers",
            got=f"tail_layers: {settings.tail_layers}",
            remedy="let the server draft with jakiro serve --drafter, or train another drafter",
        )
    check_target(drafter.config.target_record, target.spec)
    check_tokenizer(drafter.config.target_record, tokenizer)
    with written_folder(folder) as partial:
        drafter.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        has_head = drafter.own_head is None
        write_device_target(
            target, drafter.draft_ids, partial, embedding=embedding, has_head=has_head
        )
