"""The module that the DeepSpeed engine wraps, the frozen target's reader, and the loss meter."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError
from jakiro.experts import ExpertsOutput
from jakiro.target.adapter import TargetAdapter
from jakiro.target.cache import SlotCache
from jakiro.target.tail import TargetTail
from training.loss.accepted_length import text_log_probs, with_accept_rates, with_accepted_length
from training.loss.batch import Batch, TargetView, look_at_target, states_kept
from training.loss.drafting import draft_all_positions
from training.loss.heads import Heads
from training.loss.objectives import Goals, LossTerms, drafter_loss, shared_normalizers
from training.loss.settings import ObjectiveSettings
from training.processes import Processes
from training.target_states.store import TargetStateStore, view_of

OnOutput = Callable[[int, ExpertsOutput], None]

_PER_LEVEL = {
    *("token", "multiple_choice", "feature", "contrast", "correct"),
    *("level_count", "level_weight"),
}
_PER_DEPTH = {"accept", "depth_count"}


class TargetReader:
    """Runs the frozen target over batches, or reads its states from disk.

    Raises:
        TargetNotSupported: the drafter needs the target's last layers, but these layers cannot be
            run separately.
    """

    def __init__(
        self,
        target: TargetAdapter,
        drafter: JakiroDrafter,
        sequence_length: int,
        dtype: torch.dtype,
        target_states: TargetStateStore | None = None,
    ) -> None:
        self._target = target
        self._sources = drafter.state_sources
        self._sequence_length = sequence_length
        self._target_states = target_states
        self.dtype = dtype
        num_tail = drafter.config.settings.tail_layers
        self.tail = TargetTail(target, num_tail) if num_tail else None
        self.heads = Heads.of(drafter.draft_head(target))
        self._caches: dict[int, SlotCache] = {}  # key: number of sequences in a batch

    def view(self, batch: Batch) -> TargetView:
        if self._target_states is not None:
            return self._read(batch, self._target_states).to(self.dtype)
        cache = self._cache_for(batch.token_ids.shape[0])
        view = look_at_target(self._target, batch, self._sources, cache, self.tail)
        return view.to(self.dtype)

    @torch.no_grad()
    def _read(self, batch: Batch, target_states: TargetStateStore) -> TargetView:
        target = self._target
        numbers = batch.sequence_ids.tolist()
        stored = target_states.read(numbers)
        parts = {name: part.to(target.device, target.dtype) for name, part in stored.items()}
        view = view_of(parts, target.embed(batch.token_ids), self._sources, self.tail)
        # Normalizers belong to the stored features, and not to features that are rounded again.
        is_exact = self.dtype in (torch.float32, target.dtype, target_states.dtype)
        normalizers = target_states.normalizers(numbers) if is_exact else None
        return view._replace(
            normalizers=None if normalizers is None else normalizers.to(target.device)
        )

    def _cache_for(self, batch_size: int) -> SlotCache:
        if batch_size not in self._caches:
            self._caches[batch_size] = self._target.new_cache(
                batch_size, self._sequence_length, states_kept(self._sources, self.tail)
            )
        return self._caches[batch_size]


def move_target(target: TargetAdapter, device: torch.device, *, needs_layers: bool) -> None:
    """Move the target to the device on which the run computes; unneeded layers to the CPU."""
    model: nn.Module = target.model
    model.to(device if needs_layers else "cpu")
    for part in (target.model.get_input_embeddings(), target.model.get_output_embeddings()):
        part.to(device)


class TrainingModule(nn.Module):
    """Computes the summed loss of a batch; contains the drafter and no part of the target.

    Args:
        crosses_samples: whether draft paths cross anchor samples (`draft_paths`); None if they do
            so in a rollout only.
    """

    def __init__(
        self,
        drafter: JakiroDrafter,
        settings: ObjectiveSettings,
        recompute: bool = False,
        crosses_samples: bool | None = None,
        autocast: bool = False,
    ) -> None:
        super().__init__()
        if drafter.path_tables is not None:
            raise ConfigError(
                "a drafter that was imported from DSpark (schedule.path tables) cannot learn",
                remedy="decode with it without --adapt, or train another drafter",
            )
        self.drafter = drafter
        self._is_rolled_out = drafter.trunk.feature_input is not None
        self._crosses_samples = self._is_rolled_out if crosses_samples is None else crosses_samples
        self.settings = settings
        self._computation = {"recompute": recompute, "autocast": autocast}

    def forward(
        self,
        view: TargetView,
        batch: Batch,
        reader: TargetReader,
        on_output: OnOutput = lambda _sample, _output: None,
    ) -> LossTerms:
        """Return the loss terms summed over all anchor samples.

        Args:
            reader: reader of the target, passed as an argument so that no weight of the target is
                registered in this module.
        """
        heads = reader.heads.at(self.settings.token_temperature)
        chunk_size, of_text = self.settings.chunk_size, []
        num_levels = 1 + self.drafter.config.settings.schedule.parallel_levels
        normalizers = shared_normalizers(view, batch, heads, num_levels, chunk_size)
        terms, accept = [], []
        outputs = draft_all_positions(self.drafter, view, batch, reader.tail, **self._computation)
        for sample, output in enumerate(outputs):
            # With tail layers, the regression goal is the state at the input of these layers.
            goals = Goals(view.features, view.tail_input, output.state, normalizers)
            sums, rates = drafter_loss(output, goals, batch, sample, heads, self.settings)
            terms.append(sums)
            accept.append(rates)
            if self.settings.accepted_length_weight:
                of_text.append(text_log_probs(output, sample, batch, reader.heads, chunk_size))
            on_output(sample, output)
        summed = (torch.stack(column).sum(dim=0) for column in zip(*terms, strict=True))
        whole = LossTerms(*summed)
        if not torch.is_grad_enabled():
            whole = with_accept_rates(whole, accept, batch, self._crosses_samples)
        if of_text:
            whole = with_accepted_length(whole, of_text, batch, self.settings, self._is_rolled_out)
        return whole


class Meter:
    """Adds up loss terms on the device; the host waits only when it reads the sums."""

    def __init__(
        self, processes: Processes, num_levels: int, num_experts: int, num_depths: int = 1
    ) -> None:
        self._processes = processes
        sizes = dict.fromkeys(_PER_LEVEL, num_levels) | dict.fromkeys(_PER_DEPTH, num_depths)
        sizes |= {"expert_load": num_experts}
        self._sizes = [*(sizes.get(name, 1) for name in LossTerms._fields), 1]
        self._sums = self._zeros()

    def add(self, terms: LossTerms, num_tokens: int) -> None:
        columns = [column.detach().reshape(-1).double() for column in terms]
        self._sums += torch.cat([*columns, torch.full_like(columns[0], num_tokens)])

    def read(self) -> dict[str, Any]:
        """Return the mean losses per position, and the numbers of positions and tokens.

        Terms that are not computed are left out. Means of the terms are weighted by
        `objective.distance_decay`; the loss is the one that is minimized, which is divided by the
        number of positions instead of the sum of their weights.

        `accept_rate` is, by depth of the draft path, the probability that a token sampled from the
        draft distribution is accepted at temperature 1. `tau_probabilistic` is the expected number
        of tokens of a decoding step with one such token at each depth. Both are means over
        positions, without weights.

        All cover the time since the last call, because this method resets the sums to zero. All
        processes must call it.
        """
        columns = self._processes.sum(self._sums).split(self._sizes)
        self._sums = self._zeros()
        *sums, num_tokens = [column.tolist() for column in columns]
        terms: Any = LossTerms(*sums)
        count = max(terms.num_positions[0], 1.0)
        metrics = {
            "loss": terms.total[0] / count,
            "levels": [
                {
                    "token": token / (weight or 1.0),
                    "feature": feature / (weight or 1.0),
                    "contrast": contrast / (weight or 1.0),
                    "agreement": correct / max(number, 1.0),
                    **({"multiple_choice": choice / weight} if choice else {}),
                }
                for token, choice, feature, contrast, weight, correct, number in zip(
                    terms.token,
                    terms.multiple_choice,
                    terms.feature,
                    terms.contrast,
                    terms.level_weight,
                    terms.correct,
                    terms.level_count,
                    strict=True,
                )
            ],
            "router_imbalance": terms.balance[0] / (terms.level_weight[0] or 1.0),
            "router_entropy": terms.router_entropy[0] / count,
            "expert_load": [load / count for load in terms.expert_load],
            "positions": int(terms.num_positions[0]),
            "tokens": int(num_tokens[0]),
        }
        if any(terms.depth_count):
            rates = zip(terms.accept, terms.depth_count, strict=True)
            metrics["accept_rate"] = [accept / max(number, 1.0) for accept, number in rates]
        if terms.depth_count[-1]:
            metrics["tau_probabilistic"] = terms.path_tokens[0] / terms.depth_count[-1]
        if terms.num_trees[0]:
            metrics["accepted_length"] = terms.accepted_length[0] / terms.num_trees[0]
        return metrics

    def count_tokens(self) -> int:
        """Return the number of tokens since the last `read`, without resetting the sums.

        All processes must call this method.
        """
        return int(self._processes.sum(self._sums[-1:].clone()).item())

    def _zeros(self) -> Tensor:
        return torch.zeros(sum(self._sizes), dtype=torch.float64, device=self._processes.device)
