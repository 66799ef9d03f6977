"""The drafter: memory encoder, MoA trunk and expert bank as one Hugging Face model."""

from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from jakiro.config import JakiroConfig, state_source, state_widths
from jakiro.errors import CheckpointError
from jakiro.experts import BankOutput, ExpertBank
from moa.memory_encoder import MemoryEncoder
from moa.rows import Rows, RowStore, only_these
from moa.trunk import MoaTrunk


class JakiroDrafter(PreTrainedModel):
    """Guesses the target's next features from tokens and from memory of verified positions.

    One `forward` serves training, evaluation and decoding. The output at position i predicts the
    target's feature at i (whose logits are the law of token i + 1) from tokens up to i and from
    memory of verified positions only; parallel level k predicts the feature at i + k.

    Embeddings and logits are the target's: the caller passes embedded tokens in and turns features
    into laws with `TargetAdapter.logits`, so no target weight is ever part of the drafter.

    Args:
        config: settings of the drafter and the record of its target.
    """

    config_class = JakiroConfig
    main_input_name = "embeddings"
    base_model_prefix = ""

    def __init__(self, config: JakiroConfig) -> None:
        super().__init__(config)
        settings, target = config.settings, config.target_record
        self.state_source = state_source(settings.memory, target)
        self.memory_encoder = MemoryEncoder(
            num_layers=len(self.state_source.layers),
            width=state_widths(self.state_source, target)[0],
            hidden=target.hidden_size,
            **settings.memory.model_dump(exclude={"source", "layers"}),
        )
        self.trunk = MoaTrunk(hidden=target.hidden_size, **settings.trunk.model_dump())
        self.bank = ExpertBank(
            hidden=target.hidden_size,
            num_parallel=settings.schedule.parallel_levels,
            **settings.bank.model_dump(),
        )
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Keep the modules' own initialisation."""

    def remember(
        self,
        state: Float[Tensor, "batch tokens layers width"],
        positions: Int[Tensor, "batch tokens"],
    ) -> Rows:
        """Return the cross-attention rows of verified tokens, from the target's raw state.

        Args:
            state: what `state_source` names, see `SlotCache.state`.
            positions: absolute positions of the tokens.
        """
        return self.trunk.cross_attention.rows(self.memory_encoder(state), positions)

    def forward(
        self,
        embeddings: Float[Tensor, "batch queries hidden"],
        positions: Int[Tensor, "batch queries"],
        self_mask: Bool[Tensor, "batch 1 queries keys"],
        memory_rows: Rows,
        memory_mask: Bool[Tensor, "batch 1 queries memory"],
        store: RowStore = only_these,
    ) -> BankOutput:
        """Return predicted features of all levels for each query; see `MoaTrunk`, `ExpertBank`."""
        return self.bank(
            self.trunk(embeddings, positions, self_mask, memory_rows, memory_mask, store)
        )

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
        return cast(JakiroDrafter, drafter)


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
