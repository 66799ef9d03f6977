"""Export of a run's best drafter so far, and of the finished drafter, with their records."""

import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from inference.decoder import SpeculativeDecoder
from jakiro.drafter import JakiroDrafter
from jakiro.errors import CheckpointError, JakiroError
from jakiro.utils.provenance import provenance
from training.distributed.checkpoint import RunState
from training.distributed.failures import writing
from training.distributed.processes import Processes
from training.evaluation.evaluate import mean_tau
from training.loop.run_folder import RunFolder
from training.setup.preparation import Prepared


class Exporter:
    """Writes drafters with a record of their training; all processes act together, one writes.

    Args:
        inputs: inputs of the run.
        folder: folder of the run.
        processes: this process among those of the run.
    """

    def __init__(self, inputs: Prepared, folder: RunFolder, processes: Processes) -> None:
        self._inputs = inputs
        self._settings = inputs.settings
        self._folder = folder
        self._processes = processes

    def keep_if_best(
        self, drafter: JakiroDrafter, evaluation: Mapping[str, Any], state: RunState
    ) -> None:
        """Export the drafter to `best` if it has the highest tau so far, unless this is disabled.

        Args:
            drafter: drafter with merged adapters.
            evaluation: results of the drafter's evaluation.
            state: progress of the run; `best_tau` is updated if the evaluation's tau is higher.

        Raises:
            ResourceError: the drafter cannot be written.
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
            drafter: drafter with merged adapters.
            as_trained: the same drafter with its adapters, if there are any, beside its weights.
            evaluation: results of the drafter's evaluation.
            state: progress of the run at its end.

        Raises:
            ResourceError: the drafter cannot be written.
        """
        drafter.config.record = self._record(evaluation, state)
        with writing("a drafter", self._folder.path, self._processes) as is_writing:
            if is_writing and self._settings.lora is not None:
                self._folder.keep_adapters(as_trained, str(self._settings.initialize.drafter))
            if is_writing:
                self._folder.publish(drafter, self._inputs.tokenizer)

    def _record(self, evaluation: Mapping[str, Any], state: RunState) -> dict[str, Any]:
        """Return the record of a drafter's training, which its config holds."""
        return {
            "provenance": provenance(),
            "settings": self._settings.model_dump(mode="json"),
            "training": asdict(state),
            "evaluation": dict(evaluation),
        }


_MAX_NEW_TOKENS = 4  # tokens that the self-test decodes
_PROMPT_LENGTH = 16  # tokens of its prompt


def check_untrained(
    drafter: JakiroDrafter,
    inputs: Prepared,
    folder: Path,
    processes: Processes,
    decodes: bool = True,
) -> None:
    """Raise unless a drafter can be saved, loaded, and decodes with the target, on every process.

    All processes must call this function, and all raise an error of any of them.

    Args:
        drafter: the drafter before the first step, whole on every process.
        inputs: inputs of the run, whose target is on its device.
        folder: folder of the run.
        processes: this process among those of the run.
        decodes: whether the target can be run; otherwise nothing is decoded.

    Raises:
        CheckpointError: the loaded weights differ from the saved ones, or decoding fails.
    """
    used, problem = _saved_and_loaded(drafter, folder) if processes.is_first else (drafter, None)
    if decodes and problem is None:
        problem = _problem_of_decoding(used, inputs)
    problems = [found for found in processes.gather(problem) if found is not None]
    if problems:
        raise CheckpointError(
            "the self-test before the first step failed",
            expected="a drafter that can be saved, loaded again, and decodes with the target",
            got=problems[0],
            remedy="nothing is lost yet: free disk space, or report the settings and the target",
        )


def _saved_and_loaded(drafter: JakiroDrafter, folder: Path) -> tuple[JakiroDrafter, str | None]:
    """Return the drafter after saving and loading, and a description of an error, or None."""
    temporary = folder / ".self-test"
    try:
        drafter.save_pretrained(temporary)
        loaded: Any = JakiroDrafter.from_pretrained(temporary, dtype=drafter.dtype)
        loaded.to(drafter.device)
    except (JakiroError, OSError, RuntimeError, ValueError) as error:
        return drafter, f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    before, after = drafter.state_dict(), loaded.state_dict()
    for name, part in before.items():
        if not torch.equal(part, after[name]):
            return loaded, f"{name} differs after it was loaded"
    return loaded, None


def _problem_of_decoding(drafter: JakiroDrafter, inputs: Prepared) -> str | None:
    """Return a description of an error when a few tokens are decoded, or None."""
    longest = inputs.target.spec.max_position
    length = max(1, min(_PROMPT_LENGTH, longest - _MAX_NEW_TOKENS))
    prompt = inputs.sequences.sequence(0).token_ids[:length].tolist()
    count = min(_MAX_NEW_TOKENS, longest - len(prompt))
    try:
        with torch.random.fork_rng(devices=[]):
            answers = [
                SpeculativeDecoder(inputs.target.model, used, inputs.tokenizer).generate(
                    prompt, temperature=0.0, min_new_tokens=count, max_new_tokens=count
                )
                for used in (drafter, None)
            ]
    except (JakiroError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    drafted, expected = (answer.sequences.tolist() for answer in answers)
    # In half precision, rounding decides between two tokens with nearly the same logits.
    if inputs.target.dtype == torch.float32 and drafted != expected:
        return f"tokens {drafted} instead of the target's own {expected}"
    return None
