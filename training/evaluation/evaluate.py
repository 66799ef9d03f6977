"""Measuring a drafter on what training has not seen: losses, experts, the real decode loop."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from inference.decoder import SpeculativeDecoder
from inference.engine.stats import DecodeStats
from jakiro.drafter import JakiroDrafter
from jakiro.utils.logs import get_logger
from training.config import decoding_rule
from training.data.sampler import Sampler
from training.distributed.processes import Processes
from training.evaluation.diversity import Diversity, drafted
from training.loss.batch import Batch
from training.loss.drafting import draft_all_positions
from training.module import Meter, TargetReader, TrainingModule
from training.setup.preparation import Prepared

_logger = get_logger(__name__)


class Evaluation:
    """Measures drafters on held-out rows and prompts, which are shared out over the processes.

    Args:
        inputs: of the run.
        reader: of the target.
        processes: this one among the others.
    """

    def __init__(self, inputs: Prepared, reader: TargetReader, processes: Processes) -> None:
        self._inputs = inputs
        self._settings = inputs.settings
        self._reader = reader
        self._processes = processes

    def warn_if_blind(self) -> None:
        """Say if there is nothing to measure on."""
        inputs = self._inputs
        if self._processes.is_first and not inputs.prompts and not len(inputs.held_out):
            _logger.warning(
                "evaluation.every has nothing to measure on: set data.validation_size, or name "
                "evaluation.prompts"
            )

    def measure(self, drafter: JakiroDrafter) -> dict[str, Any]:
        """Return what is known of a drafter.

        `held_out` are mean losses at the distances that decoding has, `experts` says how different
        these are, and `decoding` has tau and acceptance, by depth and by the expert that
        favoured a candidate, per temperature.

        What there is nothing held out for is left out. All processes must call it.
        """
        results: dict[str, Any] = {}
        if len(self._inputs.held_out) and self._settings.evaluation.num_sequences:
            results |= self._measure_rows(drafter)
        if self._inputs.prompts:
            results["decoding"] = self._measure_decoding(drafter)
        return results

    @torch.no_grad()
    def _measure_rows(self, drafter: JakiroDrafter) -> dict[str, Any]:
        module = TrainingModule(drafter, self._settings.objective)
        meter = Meter(self._processes, 1 + self._settings.drafter.schedule.parallel_levels)
        experts = self._settings.drafter.experts
        diversity = Diversity(self._processes, experts.num_experts, experts.combine == "mixture")
        for batch in self._held_out_batches():
            view = self._reader.view(batch)
            terms = module(view, batch, self._reader)
            meter.add(terms, int((batch.documents >= 0).sum()))
            outputs = draft_all_positions(drafter, view, batch, self._reader.tail)
            for output, chosen in zip(outputs, drafted(batch), strict=True):
                diversity.add(output, chosen, self._reader.heads.draft)
        return {"held_out": meter.read(), "experts": diversity.read()}

    def _held_out_batches(self) -> Iterator[Batch]:
        """Yield this process's share of the held-out rows."""
        sampler, num_rows = self._held_out_rows()
        size = self._settings.batch.micro_batch_size
        for begin in range(size * self._processes.rank, num_rows, size * self._processes.count):
            batch = sampler.batch(0, begin, min(begin + size, num_rows))
            yield batch.to(self._processes.device)

    def _held_out_rows(self) -> tuple[Sampler, int]:
        """Return the held-out rows, always with the same anchors, and how many to look at."""
        rows = self._inputs.held_out
        sampler = Sampler(
            rows,
            rows_per_step=len(rows),
            rule=decoding_rule(self._settings.drafter),
            seed=self._settings.seed,
            first_number=len(self._inputs.rows),
        )
        return sampler, min(self._settings.evaluation.num_sequences, len(rows))

    def _measure_decoding(self, drafter: JakiroDrafter) -> list[dict[str, Any]]:
        decoder = SpeculativeDecoder(self._inputs.target.model, drafter, self._inputs.tokenizer)
        return [
            self._decode(decoder, temperature)
            for temperature in self._settings.evaluation.temperatures
        ]

    def _decode(self, decoder: SpeculativeDecoder, temperature: float) -> dict[str, Any]:
        """Continue the prompts, each with a seed of its own."""
        limit = self._settings.evaluation.max_new_tokens
        prompts = list(enumerate(self._inputs.prompts))
        mine = DecodeStats.pooled(
            decoder.generate(prompt, temperature=temperature, seed=seed, max_new_tokens=limit).stats
            for seed, prompt in prompts[self._processes.rank :: self._processes.count]
        )
        stats = DecodeStats.pooled(self._processes.gather(mine))
        experts = range(self._settings.drafter.experts.num_experts)
        return {
            "temperature": temperature,
            "tau": stats.tau,
            "acceptance_by_depth": stats.conditional_acceptance_rate,
            "acceptance_by_expert": [stats.acceptance_of(expert) for expert in experts],
            "candidates_by_expert": [stats.proposed_by_proposer[expert] for expert in experts],
            "prompts": len(prompts),
            "tokens": stats.emitted,
        }


def mean_tau(results: Mapping[str, Any]) -> float | None:
    """Return the mean tau over temperatures that `Evaluation.measure` found, if it decoded."""
    taus = [float(at["tau"]) for at in results.get("decoding", ())]
    return sum(taus) / len(taus) if taus else None
