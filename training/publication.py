"""What a run gives away: its best drafter so far, and the finished one, each with its record."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from jakiro.drafter import JakiroDrafter
from jakiro.provenance import provenance
from training.checkpoint import RunState
from training.evaluate import mean_tau
from training.failures import writing
from training.preparation import Prepared
from training.processes import Processes
from training.run_folder import RunFolder


class Publication:
    """Writes drafters that say how they came about; all processes act together, one writes.

    Args:
        inputs: of the run.
        folder: of the run.
        processes: this one among the others.
    """

    def __init__(self, inputs: Prepared, folder: RunFolder, processes: Processes) -> None:
        self._inputs = inputs
        self._settings = inputs.settings
        self._folder = folder
        self._processes = processes

    def keep_if_best(
        self, drafter: JakiroDrafter, evaluation: Mapping[str, Any], state: RunState
    ) -> None:
        """Let `best` be this drafter if it has a higher tau than any before, and that is wanted.

        Args:
            drafter: as it decodes.
            evaluation: of it.
            state: of the run now; `best_tau` becomes that of the evaluation if it is the highest.

        Raises:
            ResourceError: it cannot be written.
        """
        tau, is_wanted = mean_tau(evaluation), self._settings.checkpoint.keep_best
        if tau is None or not is_wanted or (state.best_tau or 0.0) >= tau:
            return
        state.best_tau = tau
        drafter.config.record = self._record(evaluation, state)
        with writing("a drafter", self._folder.path, self._processes) as is_writing:
            if is_writing:
                self._folder.keep_best(drafter, self._inputs.tokenizer)

    def finish(
        self,
        drafter: JakiroDrafter,
        as_trained: JakiroDrafter,
        evaluation: Mapping[str, Any],
        state: RunState,
    ) -> None:
        """Write the finished drafter, and its adapters by themselves if it has any.

        Args:
            drafter: as it decodes.
            as_trained: the same, with its adapters beside its weights.
            evaluation: of it.
            state: of the run at its end.

        Raises:
            ResourceError: it cannot be written.
        """
        drafter.config.record = self._record(evaluation, state)
        with writing("a drafter", self._folder.path, self._processes) as is_writing:
            if is_writing and self._settings.lora is not None:
                self._folder.keep_adapters(as_trained, str(self._settings.initialize.drafter))
            if is_writing:
                self._folder.publish(drafter, self._inputs.tokenizer)

    def _record(self, evaluation: Mapping[str, Any], state: RunState) -> dict[str, Any]:
        """Return what a drafter's config says of how it came about."""
        return {
            "provenance": provenance(),
            "settings": self._settings.model_dump(mode="json"),
            "training": asdict(state),
            "evaluation": dict(evaluation),
        }
