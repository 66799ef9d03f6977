"""Evaluation of a drafter on validation data: losses, diversity of experts, and decoding."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import partial
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from jakiro.drafter import JakiroDrafter
from jakiro.experts import ExpertsOutput
from training.config import decoding_rule
from training.data.sampler import Sampler
from training.loss.accepted_length import num_depths
from training.loss.batch import Batch
from training.loss.heads import Logits
from training.module import Meter, TargetReader, TrainingModule
from training.processes import Processes
from training.setup.preparation import RunInputs

TOP = 4  # number of each expert's most likely tokens that are compared
_CHUNK = 2048  # largest number of expert distributions that are in memory at once


class Evaluation:
    """Evaluation on validation sequences and prompts, which are divided among the processes."""

    def __init__(self, inputs: RunInputs, reader: TargetReader, processes: Processes) -> None:
        self._inputs = inputs
        self._settings = inputs.settings
        self._reader = reader
        self._processes = processes

    @property
    def size(self) -> int:
        settings, inputs = self._settings.evaluation, self._inputs
        num_continuations = len(inputs.prompts) * len(settings.temperatures)
        return min(settings.num_sequences, len(inputs.validation)) + num_continuations

    def measure(self, drafter: JakiroDrafter) -> dict[str, Any]:
        """Return the metrics of a drafter; all processes must call this method.

        The losses on validation sequences are those at the anchor distances that occur in decoding.
        """
        settings, results = self._settings.evaluation, dict[str, Any]()
        if len(self._inputs.validation) and settings.num_sequences:
            results |= self._measure_losses(drafter)
        if self._inputs.prompts and settings.temperatures:
            results["decoding"] = self._measure_decoding(drafter)
        return results

    @torch.no_grad()
    def _measure_losses(self, drafter: JakiroDrafter) -> dict[str, Any]:
        rule = decoding_rule(self._settings.drafter)
        module = TrainingModule(
            drafter, self._settings.objective, crosses_samples=rule.kind == "ttt"
        )
        num_levels = 1 + self._settings.drafter.schedule.parallel_levels
        meter = Meter(
            self._processes,
            num_levels,
            self._settings.drafter.experts.num_experts,
            num_depths(rule, num_levels),
        )
        experts = self._settings.drafter.experts
        have_pairs = experts.combine == "mixture" and experts.num_active > 1
        overlap = ExpertOverlap(self._processes)
        for batch in self._validation_batches():
            on_output = (
                [partial(overlap.add, batch, self._reader.heads.draft)] if have_pairs else []
            )
            terms = module(self._reader.view(batch), batch, self._reader, *on_output)
            meter.add(terms, int((batch.documents >= 0).sum()))
        experts_read = {"experts": overlap.read()} if have_pairs else {}
        return {"validation": meter.read()} | experts_read

    def _validation_batches(self) -> Iterator[Batch]:
        sequences, size = self._inputs.validation, self._settings.batch.micro_batch_size
        sampler = Sampler(
            sequences,
            sequences_per_step=len(sequences),
            rule=decoding_rule(self._settings.drafter),
            seed=self._settings.seed,
            first_number=len(self._inputs.sequences),
        )
        count = min(self._settings.evaluation.num_sequences, len(sequences))
        for begin in range(size * self._processes.rank, count, size * self._processes.count):
            batch = sampler.batch(0, begin, min(begin + size, count))
            yield batch.to(self._processes.device)

    def _measure_decoding(self, drafter: JakiroDrafter) -> list[dict[str, Any]]:
        """Decode the prompts, each with a separate seed, and return the metrics by temperature."""
        from inference.decoder import SpeculativeDecoder  # not needed if nothing is decoded
        from inference.engine.stats import DecodeStats

        target, tokenizer = self._inputs.target.model, self._inputs.tokenizer
        # The decoder converts its drafter to the target's dtype, and the given one is still saved.
        decoder = SpeculativeDecoder(target, deepcopy(drafter), tokenizer, "fixed")
        settings, experts = self._settings.evaluation, self._settings.drafter.experts.num_active
        limit, prompts = settings.max_new_tokens, list(enumerate(self._inputs.prompts))
        results = []
        for temperature in settings.temperatures:
            here = DecodeStats.pooled(
                decoder.generate(
                    prompt, temperature=temperature, seed=seed, max_new_tokens=limit
                ).stats
                for seed, prompt in prompts[self._processes.rank :: self._processes.count]
            )
            stats = DecodeStats.pooled(self._processes.gather(here))
            results.append(
                {
                    "temperature": temperature,
                    "tau": stats.tau,
                    "conditional_acceptance_rate": stats.conditional_acceptance_rate,
                    "acceptance_by_expert": [stats.acceptance_of(n) for n in range(experts)],
                    "candidates_by_expert": [stats.proposed_by_proposer[n] for n in range(experts)],
                    "prompts": len(prompts),
                    "tokens": stats.emitted,
                }
            )
        return results


class ExpertOverlap:
    """The overlap of the experts' most likely tokens, averaged over drafted positions."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._sums = torch.zeros(2, dtype=torch.float64, device=processes.device)

    @torch.no_grad()
    def add(self, batch: Batch, logits: Logits, sample: int, output: ExpertsOutput) -> None:
        index = torch.arange(batch.token_ids.shape[1], device=batch.token_ids.device)
        selected = batch.targets_exist(1) & (index > batch.anchors[:, sample])
        features = output.features[:, :, 0][selected]
        for part in features.split(max(1, _CHUNK // features.shape[1])):
            self._sums[0] += top_overlap(logits(part)).double().sum()
        self._sums[1] += len(features)

    def read(self) -> dict[str, float]:
        """Return the fraction of the 4 most likely tokens that two experts have in common.

        It is averaged over pairs of experts. All processes must call this method.
        """
        overlap, count = self._processes.sum(self._sums.clone()).tolist()
        return {"top_overlap": overlap / max(count, 1.0)}


def top_overlap(logits: Float[Tensor, "n experts vocab"]) -> Float[Tensor, " n"]:
    """Return the share of the most likely tokens that two experts have in common, on average."""
    best = logits.topk(min(TOP, logits.shape[-1]), dim=-1).indices
    count, size = best.shape[1:]
    first, second = torch.triu_indices(count, count, offset=1, device=best.device)
    common = (best[:, first, :, None] == best[:, second, None, :]).flatten(2).sum(dim=-1)
    return common.float().mean(dim=1) / size


def scores_of(results: Mapping[str, Any]) -> dict[str, float]:
    """Return the measured qualities; drafters of a run are compared by the first of them.

    What is measured on held-out text has many more positions than tau, so it comes first: the
    expected number of tokens of a step with a chain of drafts (unless no path of that text is long
    enough), and the share of positions at which the drafter's and the target's most likely next
    tokens are the same. Tau is averaged over temperatures.
    """
    validation, scores = results.get("validation") or {"positions": 0}, {}
    if "tau_probabilistic" in validation:
        scores["tau_probabilistic"] = float(validation["tau_probabilistic"])
    if validation["positions"]:
        scores["agreement"] = float(validation["levels"][0]["agreement"])
    if taus := [float(decoding["tau"]) for decoding in results.get("decoding", ())]:
        scores["tau"] = fmean(taus)
    return scores


def summary_of(results: Mapping[str, Any]) -> str:
    """Return the scores of an evaluation as text; empty if nothing was measured."""
    return ", ".join(
        f"held-out agreement {score:.1%}" if name == "agreement" else f"{name} {score:.2f}"
        for name, score in scores_of(results).items()
    )
