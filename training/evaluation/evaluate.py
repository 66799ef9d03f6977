"""Evaluation of a drafter on validation data: losses, diversity of experts, and decoding."""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

from inference.decoder import SpeculativeDecoder
from inference.engine.stats import DecodeStats
from jakiro.drafter import JakiroDrafter
from jakiro.experts import ExpertsOutput
from training.config import decoding_rule
from training.data.sampler import Sampler
from training.distributed.processes import Processes
from training.evaluation.diversity import Diversity, drafted
from training.loss.batch import Batch
from training.module import Meter, TargetReader, TrainingModule
from training.setup.preparation import RunInputs


class Evaluation:
    """Evaluation on validation sequences and prompts, which are divided among the processes."""

    def __init__(self, inputs: RunInputs, reader: TargetReader, processes: Processes) -> None:
        self._inputs = inputs
        self._settings = inputs.settings
        self._reader = reader
        self._processes = processes

    @property
    def size(self) -> int:
        """The number of sequences and continuations that are measured."""
        settings, inputs = self._settings.evaluation, self._inputs
        num_continuations = len(inputs.prompts) * len(settings.temperatures)
        return min(settings.num_sequences, len(inputs.validation)) + num_continuations

    @property
    def _measures_losses(self) -> bool:
        return len(self._inputs.validation) > 0 and self._settings.evaluation.num_sequences > 0

    @property
    def _measures_decoding(self) -> bool:
        return bool(self._inputs.prompts and self._settings.evaluation.temperatures)

    def measure(self, drafter: JakiroDrafter) -> dict[str, Any]:
        """Return the metrics of a drafter; all processes must call this method.

        `validation` contains the mean losses on the validation sequences, at the anchor distances
        that occur in decoding. `experts` contains the diversity of the experts. `decoding`
        contains, for each temperature, tau and the acceptance rates by depth and by the expert that
        proposed a candidate. If there are no validation sequences or no prompts, the corresponding
        metrics are left out.
        """
        results: dict[str, Any] = {}
        if self._measures_losses:
            results |= self._measure_losses(drafter)
        if self._measures_decoding:
            results["decoding"] = self._measure_decoding(drafter)
        return results

    @torch.no_grad()
    def _measure_losses(self, drafter: JakiroDrafter) -> dict[str, Any]:
        module = TrainingModule(drafter, self._settings.objective)
        meter = Meter(
            self._processes,
            1 + self._settings.drafter.schedule.parallel_levels,
            self._settings.drafter.experts.num_experts,
        )
        experts = self._settings.drafter.experts
        diversity = Diversity(
            self._processes,
            experts.num_experts,
            experts.num_active if experts.combine == "mixture" else 1,
        )
        for batch in self._validation_batches():
            on_output = partial(_add, diversity, list(drafted(batch)), self._reader)
            terms = module(self._reader.view(batch), batch, self._reader, on_output)
            meter.add(terms, int((batch.documents >= 0).sum()))
        return {"validation": meter.read(), "experts": diversity.read()}

    def _validation_batches(self) -> Iterator[Batch]:
        """Yield this process's share of the validation sequences, in micro-batches."""
        sampler, count = self._validation_sampler()
        size = self._settings.batch.micro_batch_size
        for begin in range(size * self._processes.rank, count, size * self._processes.count):
            batch = sampler.batch(0, begin, min(begin + size, count))
            yield batch.to(self._processes.device)

    def _validation_sampler(self) -> tuple[Sampler, int]:
        """Return a sampler that always yields the same anchors, and the number of sequences."""
        sequences = self._inputs.validation
        sampler = Sampler(
            sequences,
            sequences_per_step=len(sequences),
            rule=decoding_rule(self._settings.drafter),
            seed=self._settings.seed,
            first_number=len(self._inputs.sequences),
        )
        return sampler, min(self._settings.evaluation.num_sequences, len(sequences))

    def _measure_decoding(self, drafter: JakiroDrafter) -> list[dict[str, Any]]:
        target, tokenizer = self._inputs.target.model, self._inputs.tokenizer
        # The decoder converts its drafter to the target's dtype, and the given one is still saved.
        decoder = SpeculativeDecoder(target, deepcopy(drafter), tokenizer, "fixed")
        return [
            self._decode(decoder, temperature)
            for temperature in self._settings.evaluation.temperatures
        ]

    def _decode(self, decoder: SpeculativeDecoder, temperature: float) -> dict[str, Any]:
        """Decode the prompts, each with a separate seed, and return the metrics."""
        limit = self._settings.evaluation.max_new_tokens
        prompts = list(enumerate(self._inputs.prompts))
        mine = DecodeStats.pooled(
            decoder.generate(prompt, temperature=temperature, seed=seed, max_new_tokens=limit).stats
            for seed, prompt in prompts[self._processes.rank :: self._processes.count]
        )
        stats = DecodeStats.pooled(self._processes.gather(mine))
        experts = range(self._settings.drafter.experts.num_active)
        return {
            "temperature": temperature,
            "tau": stats.tau,
            "conditional_acceptance_rate": stats.conditional_acceptance_rate,
            "acceptance_by_expert": [stats.acceptance_of(expert) for expert in experts],
            "candidates_by_expert": [stats.proposed_by_proposer[expert] for expert in experts],
            "prompts": len(prompts),
            "tokens": stats.emitted,
        }


def _add(
    diversity: Diversity,
    drafted_positions: Sequence[Bool[Tensor, "batch length"]],
    reader: TargetReader,
    sample: int,
    output: ExpertsOutput,
) -> None:
    """Add the drafted positions of an anchor sample to the diversity of the experts."""
    diversity.add(output, drafted_positions[sample], reader.heads.draft)


class Score(NamedTuple):
    """The measured quality of a drafter.

    Attributes:
        metric: "agreement", the share of held-out positions at which the drafter's and the target's
            most likely next tokens are the same, or "tau", averaged over temperatures.
    """

    metric: Literal["agreement", "tau"]
    value: float

    def __str__(self) -> str:
        if self.metric == "tau":
            return f"tau {self.value:.2f}"
        return f"held-out agreement {self.value:.1%}"


def score_of(results: Mapping[str, Any]) -> Score | None:
    """Return the score by which drafters of a run are compared; None if nothing was measured.

    Agreement is measured at many more positions than tau, so it is preferred.
    """
    validation = results.get("validation")
    if validation is not None and validation["positions"]:
        return Score("agreement", float(validation["levels"][0]["agreement"]))
    taus = [float(decoding["tau"]) for decoding in results.get("decoding", ())]
    return Score("tau", sum(taus) / len(taus)) if taus else None


def summary_of(results: Mapping[str, Any]) -> str:
    """Return the agreement and tau of an evaluation as text; empty if nothing was measured."""
    score = score_of(results)
    agreement = [str(score)] if score is not None and score.metric == "agreement" else []
    taus = [
        f"tau {decoding['tau']:.2f} at temperature {decoding['temperature']:g}"
        for decoding in results.get("decoding", ())
    ]
    return ", ".join([*agreement, *taus])
