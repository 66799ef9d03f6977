"""The drafter: memory encoder, trunk and expert bank as one Hugging Face model."""

from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from jakiro.config import DrafterSettings, JakiroConfig, state_source, state_widths
from jakiro.errors import CheckpointError
from jakiro.experts import BankOutput, ExpertBank
from jakiro.feedback_trunk import FeedbackTrunk
from moa.memory_encoder import MemoryEncoder
from moa.rows import RowStore, only_these
from moa.trunk import MemoryView, MoaTrunk

Evidence = MemoryView | Float[Tensor, "batch queries hidden"]


class JakiroDrafter(PreTrainedModel):
    """Guesses the target's next features from tokens and from memory of verified positions.

    One `forward` serves training, evaluation and decoding. The output at position i predicts the
    target's feature at i (whose logits are the law of token i + 1) from tokens up to i and from
    memory of verified positions only; parallel level k predicts the feature at i + k.

    Embeddings and logits are the target's: the caller passes embedded tokens in and turns features
    into laws with a `DraftHead`, so no target weight is ever part of the drafter.

    Where only some tokens are drafted, `draft_ids` [draft_vocab] has their ids, ascending, and is
    part of the checkpoint; else it is None.

    Args:
        config: settings of the drafter and the record of its target.
    """

    config_class = JakiroConfig
    main_input_name = "embeddings"
    base_model_prefix = ""

    def __init__(self, config: JakiroConfig) -> None:
        super().__init__(config)
        settings, target = config.settings, config.target_record
        self.state_source = state_source(settings, target)
        encoding = settings.memory.model_dump(exclude={"source", "layers"})
        if settings.trunk.kind == "feedback":
            encoding["layer_attention"] = False
        self.memory_encoder = MemoryEncoder(
            num_layers=len(self.state_source.layers),
            width=state_widths(self.state_source, target)[0],
            hidden=target.hidden_size,
            **encoding,
        )
        self.trunk = _build_trunk(settings, target.hidden_size)
        self.bank = ExpertBank(
            hidden=target.hidden_size,
            num_parallel=settings.schedule.parallel_levels,
            **settings.bank.model_dump(),
        )
        size = settings.draft_vocab_size
        self.draft_ids: torch.Tensor | None
        self.register_buffer("draft_ids", None if size is None else torch.arange(size))
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Keep the modules' own initialisation."""

    def remember(
        self,
        state: Float[Tensor, "batch tokens layers width"],
        positions: Int[Tensor, "batch tokens"],
    ) -> tuple[Float[Tensor, "batch _ tokens _"], ...]:
        """Return what the trunk keeps of verified tokens, from the target's raw state.

        For a moa trunk these are the keys and values of its cross-attention, and memory itself if
        it reads anchors; for a feedback trunk the features that it reads after the tokens.

        Args:
            state: what `state_source` names, see `SlotCache.state`.
            positions: absolute positions of the tokens.
        """
        return self.trunk.remember(self.memory_encoder(state), positions)

    def forward(
        self,
        embeddings: Float[Tensor, "batch queries hidden"],
        positions: Int[Tensor, "batch queries"],
        self_mask: Bool[Tensor, "batch 1 queries keys"],
        evidence: Evidence,
        store: RowStore = only_these,
    ) -> BankOutput:
        """Return predicted features of all levels for each query; see `ExpertBank`.

        Args:
            embeddings: of the tokens.
            positions: where they stand.
            self_mask: True where a query may look among the rows that `store` returns.
            evidence: of what is verified: for a moa trunk memory and who may see it, for a feedback
                trunk the feature of the position before each query.
            store: of self-attention rows.
        """
        return self.bank(self.trunk(embeddings, positions, self_mask, evidence, store))

    @classmethod
    def from_pretrained(cls, path: str | Path, **kwargs: Any) -> "JakiroDrafter":  # type: ignore[override]
        """Load a drafter from a folder or hub name; weights must match the config exactly.

        Raises:
            CheckpointError: there is no drafter, or weights are missing, left over, or misshapen.
        """
        # Misfits come back in the report, where `_check_report` names and refuses them.
        kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        try:
            loaded: Any = super().from_pretrained(str(path), **kwargs)
        except (OSError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(
                f"cannot load a drafter from {path}",
                expected="config.json and model.safetensors as written by save_pretrained",
                got=str(error).strip().splitlines()[0],
                remedy="check the path, or train a drafter with `python -m training.train`",
            ) from error
        drafter, report = loaded
        _check_report(report, path)
        _check_ids(drafter, path)
        return cast(JakiroDrafter, drafter)


def _build_trunk(settings: DrafterSettings, hidden: int) -> MoaTrunk | FeedbackTrunk:
    trunk = settings.trunk
    if trunk.kind == "moa":
        return MoaTrunk(hidden=hidden, reads_anchor=trunk.reads_anchor, **trunk.geometry)
    return FeedbackTrunk(hidden=hidden, input_norms=trunk.input_norms, **trunk.geometry)


def _check_ids(drafter: JakiroDrafter, path: str | Path) -> None:
    """Refuse a table of drafted tokens that cannot be one."""
    ids, limit = drafter.draft_ids, drafter.config.target_record.vocab_size
    if ids is None:
        return
    if bool((ids.diff() <= 0).any()) or not 0 <= int(ids.min()) <= int(ids.max()) < limit:
        raise CheckpointError(
            f"the table of drafted tokens in {path} is damaged",
            expected=f"ascending ids from 0 to {limit - 1}",
            got=f"{len(ids)} ids from {int(ids.min())} to {int(ids.max())}",
            remedy="fetch the checkpoint again",
        )


def _check_report(report: dict[str, Any], path: str | Path) -> None:
    problems = {
        kind: sorted(map(str, report.get(kind) or ()))
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
    }
    if found := {kind: keys for kind, keys in problems.items() if keys}:
        raise CheckpointError(
            f"the weights in {path} do not match its config",
            expected="every parameter once, and nothing else",
            got="; ".join(f"{kind}: {', '.join(keys[:4])}" for kind, keys in found.items()),
            remedy="use the checkpoint with the config it was saved with",
        )
