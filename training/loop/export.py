"""Export of a run's best and finished drafters, with records of their training."""

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
    """Writes drafters with a record of their training; only the first process writes files.

    Args:
        inputs: inputs of the run.
        folder: folder of the run.
        processes: the processes of the run.
    """

    def __init__(self, inputs: Prepared, folder: RunFolder, processes: Processes) -> None:
        self._inputs = inputs
        self._settings = inputs.settings
        self._folder = folder
        self._processes = processes

    def keep_if_best(
        self, drafter: JakiroDrafter, evaluation: Mapping[str, Any], state: RunState
    ) -> None:
        """Export the drafter to `best` if its tau is the highest so far and `keep_best` is set.

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
        """Write the finished drafter and, if it has adapters, the adapters separately.

        Args:
            drafter: drafter with merged adapters.
            as_trained: the same drafter before its adapters, if it has any, were merged.
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
        """Return the record of a drafter's training, which is kept in the drafter's config."""
        return {
            "provenance": provenance(),
            "settings": self._settings.model_dump(mode="json"),
            "training": asdict(state),
            "evaluation": dict(evaluation),
        }


_MAX_NEW_TOKENS = 4  # largest number of tokens that the self-test decodes
_PROMPT_LENGTH = 16  # largest number of tokens in the self-test's prompt


def check_untrained(
    drafter: JakiroDrafter,
    inputs: Prepared,
    folder: Path,
    processes: Processes,
    decodes: bool = True,
) -> None:
    """Raise an error unless an untrained drafter can be saved and loaded, and decodes correctly.

    All processes must call this function. If one of them finds a problem, all raise an error.

    Args:
        drafter: the drafter before the first step, unpartitioned on every process.
        inputs: inputs of the run; the target must already be on the run's device.
        folder: folder of the run.
        processes: the processes of the run.
        decodes: whether the target can be run; if not, decoding is not checked.

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
            expected="a drafter that can be saved and loaded, and that decodes with the target",
            got=problems[0],
            remedy="free disk space if the disk is full; otherwise report the settings and the "
            "target as a bug; no optimizer step was taken yet",
        )


def _saved_and_loaded(drafter: JakiroDrafter, folder: Path) -> tuple[JakiroDrafter, str | None]:
    """Save and load the drafter; return the loaded drafter, and a description of any problem."""
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
            return loaded, f"{name} differs after saving and loading"
    return loaded, None


def _problem_of_decoding(drafter: JakiroDrafter, inputs: Prepared) -> str | None:
    """Decode a few tokens, and return a description of any problem; None if there is none."""
    longest = inputs.target.spec.max_position
    length = max(1, min(_PROMPT_LENGTH, longest - _MAX_NEW_TOKENS))
    prompt = inputs.sequences.sequence(0).token_ids[:length].tolist()
    count = min(_MAX_NEW_TOKENS, longest - len(prompt))
    try:
        with torch.random.fork_rng(devices=[]):
            answers = [
                SpeculativeDecoder(inputs.target.model, used, inputs.tokenizer, "fixed").generate(
                    prompt, temperature=0.0, min_new_tokens=count, max_new_tokens=count
                )
                for used in (drafter, None)
            ]
    except (JakiroError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    drafted, expected = (answer.sequences.tolist() for answer in answers)
    # In half precision, rounding decides between two tokens with nearly the same logits.
    if inputs.target.dtype == torch.float32 and drafted != expected:
        return f"the tokens {drafted} instead of the target's tokens {expected}"
    return None
