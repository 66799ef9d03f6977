"""Measurement of the arms by `jakiro bench`, whose process frees the memory of the training."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from inference.benchmark.document import ComparisonDocument, read_document
from inference.benchmark.method_names import AUTOREGRESSIVE, DRAFTER
from jakiro.errors import JakiroError
from jakiro.utils.dtype_names import dtype_name
from jakiro.utils.files import checksum, ensure_writable_folder, fingerprint, write_atomically
from jakiro.utils.pretrained import TORCH_DTYPES
from training.studies.ablation.runs import ArmRun
from training.studies.ablation.settings import StudySettings


def measure(
    runs: Sequence[ArmRun], study: StudySettings, prompts: Path, folder: Path
) -> ComparisonDocument:
    """Return the figures of all arms with one seed, and of autoregressive decoding.

    The timings are interleaved, so that speeds can be compared. Stored results are reused unless an
    arm was trained again or the settings of the measurement have changed.
    """
    seed = runs[0].seed
    path = ensure_writable_folder(folder) / f"seed-{seed}.json"
    stored, key = path.with_suffix(".key"), _key(runs, study, prompts)
    if not (path.exists() and stored.exists() and stored.read_text() == key):
        # An interrupted measurement leaves a partial document, but no key.
        stored.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        command = _command(runs, study, prompts, path)
        code = subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode
        if code or not path.exists():
            raise JakiroError(
                f"measuring the arms with seed {seed} failed with exit code {code}; see the "
                f"messages above, or repeat the command: {' '.join(command)}"
            )
        write_atomically(stored, key)
    return read_document(path)


def _key(runs: Sequence[ArmRun], study: StudySettings, prompts: Path) -> str:
    """Return a hash of everything that determines the figures, except for the machine."""
    target = runs[0].settings.target
    return fingerprint(
        checksum(prompts),
        [study.num_prompts, study.max_new_tokens, study.temperatures, study.repeats, study.trees],
        [target.name_or_path, target.dtype, runs[0].settings.engine.device],
        [[run.arm, checksum(run.folder.drafter / "model.safetensors")] for run in runs],
    )


def _command(runs: Sequence[ArmRun], study: StudySettings, prompts: Path, path: Path) -> list[str]:
    target = runs[0].settings.target
    options = [
        ("--target", target.name_or_path),
        ("--dtype", dtype_name(TORCH_DTYPES[target.dtype])),
        ("--device", runs[0].settings.engine.device),
        ("--prompts", str(prompts)),
        ("--num-prompts", str(study.num_prompts)),
        ("--max-new-tokens", str(study.max_new_tokens)),
        ("--repeats", str(study.repeats)),
        ("--seed", str(runs[0].seed)),
        ("--json", str(path)),
        ("--method", AUTOREGRESSIVE),
    ]
    for run in runs:
        options.append(("--method", f"{DRAFTER}={run.folder.drafter},{study.trees},name={run.arm}"))
    options += [("--temperature", repr(value)) for value in study.temperatures]
    words = [word for pair in options for word in pair]
    return [sys.executable, "-m", "jakiro", "bench", *words]
