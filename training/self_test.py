"""Before the first step: the untrained drafter is saved, loaded again, and decodes.

What would only go wrong at the end of a run, when the finished drafter is written and measured,
goes wrong here, before any work is lost.
"""

import shutil
from pathlib import Path
from typing import Any

import torch

from inference.decoder import SpeculativeDecoder
from jakiro.drafter import JakiroDrafter
from jakiro.errors import CheckpointError, JakiroError
from training.preparation import Prepared
from training.processes import Processes

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
