"""What a run gives away: its best drafter so far, and the finished one, each with its record."""

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


_TOKENS = 4  # decoded
_PROMPT = 16  # tokens read


def check_untrained(
    drafter: JakiroDrafter,
    inputs: Prepared,
    folder: Path,
    processes: Processes,
    decodes: bool = True,
) -> None:
    """Raise unless a drafter survives saving and decodes with the target, on every process.

    All processes must call it, and all raise what goes wrong on any.

    Args:
        drafter: as it is before the first step, whole on every process.
        inputs: of the run; the target is where it will be.
        folder: of the run.
        processes: this one among the others.
        decodes: whether the target can be run; else nothing is decoded.

    Raises:
        CheckpointError: what is loaded is not what was saved, or it does not decode.
    """
    used, problem = _saved_and_loaded(drafter, folder) if processes.is_first else (drafter, None)
    if decodes and problem is None:
        problem = _problem_of_decoding(used, inputs)
    problems = [one for one in processes.gather(problem) if one is not None]
    if problems:
        raise CheckpointError(
            "the self-test before the first step failed",
            expected="a drafter that can be saved, loaded again, and decodes with the target",
            got=problems[0],
            remedy="nothing is lost yet: free disk space, or report the settings and the target",
        )


def _saved_and_loaded(drafter: JakiroDrafter, folder: Path) -> tuple[JakiroDrafter, str | None]:
    """Return the drafter as it is loaded after it was saved, and what goes wrong, or None."""
    place = folder / ".self-test"
    try:
        drafter.save_pretrained(place)
        loaded: Any = JakiroDrafter.from_pretrained(place, dtype=drafter.dtype)
        loaded.to(drafter.device)
    except (JakiroError, OSError, RuntimeError, ValueError) as error:
        return drafter, f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(place, ignore_errors=True)
    before, after = drafter.state_dict(), loaded.state_dict()
    for name, part in before.items():
        if not torch.equal(part, after[name]):
            return loaded, f"{name} differs after it was loaded"
    return loaded, None


def _problem_of_decoding(drafter: JakiroDrafter, inputs: Prepared) -> str | None:
    """Return what goes wrong when a few tokens are decoded, or None."""
    longest = inputs.target.spec.max_position
    prompt = inputs.rows.row(0).token_ids[: max(1, min(_PROMPT, longest - _TOKENS))].tolist()
    count = min(_TOKENS, longest - len(prompt))
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
    drafted, plain = (answer.sequences.tolist() for answer in answers)
    # In half precision two tokens may be tied up to rounding.
    if inputs.target.dtype == torch.float32 and drafted != plain:
        return f"tokens {drafted} instead of the target's own {plain}"
    return None
