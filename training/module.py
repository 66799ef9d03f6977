"""The drafter together with its loss, as the one module that the DeepSpeed engine wraps."""

from typing import Any

import torch
from torch import Tensor, nn

from jakiro.draft_head import DraftHead
from jakiro.drafter import JakiroDrafter
from jakiro.target.adapter import TargetAdapter
from jakiro.target.cache import SlotCache
from jakiro.target.tail import TargetTail
from training.distributed.processes import Processes
from training.loss.batch import Batch
from training.loss.drafting import draft_all_positions
from training.loss.objectives import Goals, LossTerms, ObjectiveSettings, drafter_loss
from training.loss.views import TargetView, look_at_target, states_kept
from training.loss.vocab_losses import Heads
from training.target_states.states import view_of
from training.target_states.store import FeatureStore


class TargetReader:
    """Reads batches with the frozen target, into a cache that is used over and over.

    Args:
        target: the frozen target; it may compute in another dtype than the drafter.
        drafter: for which it is read.
        sequence_length: tokens of a row.
        dtype: what the drafter computes in.
        features: what the target said of all rows; None to run it. Its embeddings, its head, and
            its last layers if the drafter's output goes through them, are needed in any case.

    Raises:
        TargetNotSupported: the drafter needs the target's last layers, which cannot be had alone.
    """

    def __init__(
        self,
        target: TargetAdapter,
        drafter: JakiroDrafter,
        sequence_length: int,
        dtype: torch.dtype,
        features: FeatureStore | None = None,
    ) -> None:
        self._target = target
        self._sources = drafter.state_sources
        self._row_length = sequence_length
        self._features = features
        self.dtype = dtype
        num_tail = drafter.config.settings.tail_layers
        self.tail = TargetTail(target, num_tail) if num_tail else None
        self.heads = Heads.of(DraftHead(target, drafter.draft_ids))
        self._caches: dict[int, SlotCache] = {}  # by the number of rows

    def view(self, batch: Batch) -> TargetView:
        """Return what the target says of a batch, in the drafter's dtype."""
        if self._features is not None:
            return self._recalled(batch, self._features).to(self.dtype)
        cache = self._cache_for(batch.token_ids.shape[0])
        view = look_at_target(self._target, batch, self._sources, cache, self.tail)
        return view.to(self.dtype)

    @torch.no_grad()
    def _recalled(self, batch: Batch, features: FeatureStore) -> TargetView:
        """Return what the target said of a batch when its features were written."""
        target = self._target
        kept = features.read(batch.numbers.tolist())
        parts = {name: part.to(target.device, target.dtype) for name, part in kept.items()}
        return view_of(parts, target.embed(batch.token_ids), self._sources, self.tail)

    def _cache_for(self, num_rows: int) -> SlotCache:
        if num_rows not in self._caches:
            self._caches[num_rows] = self._target.new_cache(
                num_rows, self._row_length, states_kept(self._sources, self.tail)
            )
        return self._caches[num_rows]


def place_target(target: TargetAdapter, device: torch.device, *, needs_layers: bool) -> None:
    """Move the target to where training computes; its layers only if they are going to run."""
    model: nn.Module = target.model
    ends = (target.model.get_input_embeddings(), target.model.get_output_embeddings())
    if needs_layers:
        model.to(device)
        return
    model.to("cpu")
    for part in ends:
        part.to(device)


class TrainingModule(nn.Module):
    """Computes the summed loss of a batch; holds the drafter and nothing of the target.

    Args:
        drafter: the only part with parameters.
        settings: weights of the loss terms.
        recompute: whether backward computes the drafter's activations again instead of keeping
            them.
    """

    def __init__(
        self, drafter: JakiroDrafter, settings: ObjectiveSettings, recompute: bool = False
    ) -> None:
        super().__init__()
        self.drafter = drafter
        self.settings = settings
        self._recompute = recompute

    def forward(self, view: TargetView, batch: Batch, reader: TargetReader) -> LossTerms:
        """Return the loss terms summed over all draws of anchors.

        Args:
            view: the frozen target's side of the batch, without gradients.
            batch: the packed rows.
            reader: of the target; passed in so that no target weight is registered here.
        """
        outputs = draft_all_positions(self.drafter, view, batch, reader.tail, self._recompute)
        terms = [
            # Behind the target's last layers, their input is what is regressed.
            drafter_loss(
                output,
                Goals(view.features, view.tail_input, output.state),
                batch,
                draw,
                reader.heads,
                self.settings,
            )
            for draw, output in enumerate(outputs)
        ]
        return LossTerms(*(torch.stack(column).sum(dim=0) for column in zip(*terms, strict=True)))


_PER_LEVEL = {"token", "feature", "contrast", "correct", "level_count"}


class Meter:
    """Adds up loss terms on the device; nothing waits for the device until they are read.

    Args:
        processes: whose sums are joined when read.
        num_levels: levels that the loss terms have.
    """

    def __init__(self, processes: Processes, num_levels: int) -> None:
        self._processes = processes
        self._sizes = [num_levels if name in _PER_LEVEL else 1 for name in LossTerms._fields] + [1]
        self._sums = self._zeros()

    def add(self, terms: LossTerms, num_tokens: int) -> None:
        """Add the sums of one micro-batch of `num_tokens` tokens, padding not counted."""
        columns = [column.detach().reshape(-1).double() for column in terms]
        self._sums += torch.cat([*columns, torch.full_like(columns[0], num_tokens)])

    def read(self) -> dict[str, Any]:
        """Return means per position since the last reading, and the number of tokens read.

        All processes must call it.
        """
        columns = self._processes.sum(self._sums).split(self._sizes)
        self._sums = self._zeros()
        *sums, num_tokens = [column.tolist() for column in columns]
        terms: Any = LossTerms(*sums)
        count = max(terms.num_positions[0], 1.0)
        return {
            "loss": terms.total[0] / count,
            "levels": [
                {
                    "token": token / max(number, 1.0),
                    "feature": feature / max(number, 1.0),
                    "contrast": contrast / max(number, 1.0),
                    "agreement": correct / max(number, 1.0),
                }
                for token, feature, contrast, correct, number in zip(
                    terms.token,
                    terms.feature,
                    terms.contrast,
                    terms.correct,
                    terms.level_count,
                    strict=True,
                )
            ],
            "router_imbalance": terms.balance[0] / count,
            "positions": int(terms.num_positions[0]),
            "tokens": int(num_tokens[0]),
        }

    def count_tokens(self) -> int:
        """Return the number of tokens since the last reading, which stays the last one.

        All processes must call it.
        """
        return int(self._processes.sum(self._sums[-1:].clone()).item())

    def _zeros(self) -> Tensor:
        return torch.zeros(sum(self._sizes), dtype=torch.float64, device=self._processes.device)
