"""Records of trainings with all tokens, and their table."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from jakiro.config import JakiroConfig
from jakiro.utils.files import write_atomically
from training.studies.ablation.arms import BASE, num_parameters
from training.studies.ablation.tables import markdown_head, markdown_line

WIDE = "long-wide"  # study whose drafters are wider than those of `long`
STUDIES = ("long", "long-seed0", "long-fusion", WIDE)


def store_trainings(studies: Path, stored: Path) -> None:
    """Store the records of finished trainings, beside those that are stored already.

    Args:
        studies: folder of the studies.
        stored: file with the records.
    """
    known = json.loads(stored.read_text()) if stored.exists() else []
    found = [
        _record(folder, study)
        for study in STUDIES
        for folder in sorted((studies / study).glob("runs/*/seed-*/drafter"))
    ]
    records = {_key(record): record for record in [*known, *found]}
    if records:
        write_atomically(stored, json.dumps(list(records.values()), indent=1) + "\n")


def _key(record: dict[str, Any]) -> tuple[Any, ...]:
    return record["arm"], record["seed"], record["dtype"]


def _record(folder: Path, study: str) -> dict[str, Any]:
    config = JakiroConfig.from_pretrained(folder)
    record: Any = config.record
    arm, experts = folder.parts[-3], config.settings.experts
    if study == WIDE:
        arm = f"{arm}-{experts.intermediate_size}"
    evaluation, training = record["evaluation"], record["training"]
    return {
        "arm": arm,
        "seed": record["settings"]["seed"],
        "dtype": record["settings"]["target"]["dtype"],
        "parameters": num_parameters(config.settings, config.target_record),
        "tokens": training["tokens"],
        "minutes": round(training["seconds"] / 60),
        "agreement": evaluation["validation"]["levels"][0]["agreement"],
        "overlap": evaluation["experts"]["top_overlap"],
        "entropy": evaluation["experts"]["router_entropy"],
        "expert_load": evaluation["validation"]["expert_load"],
        "git": record["provenance"]["git"],
    }


def trainings(stored: Path, left_out: Collection[str]) -> str:
    """Return a table in Markdown of the stored trainings.

    Args:
        stored: file with the records.
        left_out: arms that are not shown.
    """
    if not stored.exists():
        return "No training is stored yet.\n"
    names = ("arm", "seed", "target", "parameters", "held-out agreement", "overlap", "entropy")
    lines = markdown_head([*names, "minutes"], ("arm", "target"))
    records = json.loads(stored.read_text())
    for record in sorted(records, key=lambda own: (own["arm"] != BASE, *_key(own))):
        if record["arm"] in left_out:
            continue
        overlap, entropy, minutes = (record[name] for name in ("overlap", "entropy", "minutes"))
        cells = [f"`{record['arm']}`", str(record["seed"]), record["dtype"]]
        cells += [f"{record['parameters'] / 1e6:.2f}M", f"{record['agreement']:.3f}"]
        cells += [
            "-" if overlap is None else f"{overlap:.2f}",
            f"{entropy:.2f}" if entropy else "-",
        ]
        lines.append(markdown_line([*cells, "-" if minutes is None else str(minutes)]))
    return "\n".join(lines) + "\n"
