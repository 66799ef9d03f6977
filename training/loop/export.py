"""Export of a run's best and finished drafters, with records of their training."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from jakiro.drafter import JakiroDrafter
from jakiro.utils.logs import get_logger
from jakiro.utils.provenance import provenance
from training.distributed.failures import writing
from training.distributed.processes import Processes
from training.distributed.run_state import RunState, record_of
from training.evaluation.evaluate import Score, score_of, summary_of
from training.loop.run_folder import RunFolder
from training.setup.preparation import RunInputs

_logger = get_logger(__name__)


class Exporter:
    """Writes drafters with a record of their training; only the first process writes files."""

    def __init__(self, inputs: RunInputs, folder: RunFolder, processes: Processes) -> None:
        self._inputs = inputs
        self._settings = inputs.settings
        self._folder = folder
        self._processes = processes

    def keep_best(
        self,
        drafter: JakiroDrafter,
        as_trained: Callable[[], JakiroDrafter],
        evaluation: Mapping[str, Any],
        state: RunState,
    ) -> None:
        """Export the best drafter so far to `best`, unless `checkpoint.keep_best` is false.

        Args:
            as_trained: function that all processes must call, and that returns the same drafter
                before its adapters, if it has any, were merged.
        """
        if not self._settings.checkpoint.keep_best:
            return
        drafter.config.record = self._record(evaluation, state)
        start = self._settings.initialize.drafter
        adapted = None if self._settings.lora is None else as_trained()
        with writing("a drafter", self._folder.path, self._processes) as is_writing:
            if is_writing:
                self._folder.keep_best(drafter, self._inputs.tokenizer, adapted, str(start))

    def finish(
        self,
        drafter: JakiroDrafter,
        as_trained: JakiroDrafter,
        evaluation: Mapping[str, Any],
        state: RunState,
    ) -> None:
        """Write the finished drafter and, if it has adapters, the adapters separately.

        The finished drafter is the one in `best` if its agreement on held-out data is higher than
        that of the last drafter and `finish_with_best` is set. Otherwise, it is the last drafter.
        """
        drafter.config.record = self._record(evaluation, state)
        with writing("a drafter", self._folder.path, self._processes) as is_writing:
            if not is_writing:
                return
            if self._finishes_with_best(state):
                self._folder.publish_best()
            else:
                if self._settings.lora is not None:
                    self._folder.keep_adapters(as_trained, str(self._settings.initialize.drafter))
                self._folder.publish(drafter, self._inputs.tokenizer)
            _logger.info(self._summary(evaluation, state))

    def _finishes_with_best(self, state: RunState) -> bool:
        """Return whether an earlier drafter with a higher agreement is to be written."""
        checkpoint, kept = self._settings.checkpoint, self._folder.best_state
        if not (checkpoint.keep_best and checkpoint.finish_with_best) or kept is None:
            return False
        is_known = (kept["best_metric"], kept["best_step"]) == ("agreement", state.best_step)
        return is_known and state.best_metric == "agreement" and state.best_step != state.step

    def _summary(self, evaluation: Mapping[str, Any], state: RunState) -> str:
        """Return a sentence that says which drafter was written, with its agreement and tau."""
        score, last = score_of(evaluation), summary_of(evaluation)
        folder, steps = self._folder.drafter, f"after {state.step} steps"
        if score is None:
            return f"{folder}: the last drafter, {steps}; nothing was measured on held-out data"
        if state.best_metric is None or state.best_value is None or state.best_step == state.step:
            return f"{folder}: the last drafter, {steps} ({last}, the best of the run)"
        if self._finishes_with_best(state):
            found = summary_of(record_of(self._folder.best)["evaluation"])
            return (
                f"{folder}: the best drafter of the run, after {state.best_step} steps ({found}; "
                f"the last drafter, {steps}: {last})"
            )
        best = Score(score.metric, state.best_value)
        return (
            f"{folder}: the last drafter, {steps} ({last}; the best of the run, after "
            f"{state.best_step} steps: {best})"
        )

    def _record(self, evaluation: Mapping[str, Any], state: RunState) -> dict[str, Any]:
        """Return the record of a drafter's training, which is kept in the drafter's config."""
        return {
            "provenance": provenance(),
            "settings": self._settings.model_dump(mode="json"),
            "training": asdict(state),
            "evaluation": dict(evaluation),
        }
