"""The program that learns from one lesson, and writes a version if it drafts better.

`jakiro serve --adapt shared` starts it, writes the lesson to its standard input, and stops it with
signals while requests are decoded. It may be killed at any time: a version is written whole, or not
at all.
"""

import os
import sys
import time
from contextlib import redirect_stdout
from copy import deepcopy
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_

from inference.adaptation.lesson import Lesson, LessonResult, Recipe, read_lesson
from inference.adaptation.versions import VersionFolder, VersionRecord
from inference.adaptation.weights import (
    ReplaceableWeights,
    adapted_ends,
    adapted_names,
    identity_of_drafter,
)
from jakiro.drafter import JakiroDrafter
from jakiro.errors import CheckpointError, JakiroError, NumericalError
from jakiro.target.adapter import TargetAdapter
from jakiro.target.record import check_target
from jakiro.utils.logs import quiet_libraries
from jakiro.utils.pretrained import load_causal_lm
from training.config import decoding_rule
from training.distributed.parent import end_with_parent
from training.input_settings import LoraSettings
from training.loss.settings import ObjectiveSettings
from training.module import TargetReader, TrainingModule
from training.online.gate import Drafters, compare_drafters
from training.online.rows import batches, cut
from training.setup.adapters import add_adapters, merged

_NICENESS = 19  # the lowest priority
# Forward KL alone, as in arXiv 2310.07177, because only the draft distribution affects acceptance.
_OBJECTIVE = ObjectiveSettings(
    token_weight=1.0, token_loss="kl", feature_weight=0.0, contrast_weight=0.0
)


def main() -> None:
    """Read a lesson from standard input, and write its result to standard output."""
    parent_process = end_with_parent()
    os.nice(_NICENESS)
    started = time.monotonic()
    with redirect_stdout(sys.stderr), quiet_libraries():
        try:
            result = learn(read_lesson(sys.stdin.buffer.read()), parent_process)
        except JakiroError as error:
            result = LessonResult(outcome="failed", error=str(error))
    result = result.model_copy(update={"seconds": time.monotonic() - started})
    sys.stdout.write(result.model_dump_json() + "\n")


def learn(lesson: Lesson, parent_process: int | None = None) -> LessonResult:
    """Learn from a lesson, and write a version if it is better than the one in use.

    The version in use must have at least the tau of the drafter itself, within noise; otherwise,
    the outcome is "harmful".

    Args:
        parent_process: id of the server, with which this process ends; None for its parent.

    Raises:
        JakiroError: the drafter, its version or the target cannot be loaded, or differs from that
            of the server; or the loss is not finite.
    """
    parent_process = parent_process or os.getppid()
    folder = VersionFolder(lesson.folder, lesson.identity)
    target, own = _loaded(lesson)
    drafter = own
    inherited: tuple[str, ...] = ()
    if lesson.parent:
        version = folder.read(lesson.parent)
        inherited = version.record.tenants
        drafter = deepcopy(own)
        weights = ReplaceableWeights(drafter)
        weights.check(version.weights)
        weights.use(version.weights)
    candidate = teach(target, drafter, lesson, parent_process)
    drafters = Drafters(own, drafter, candidate)
    found = compare_drafters(target, drafters, lesson.held_out, lesson.recipe)
    measured = {"before": found.before, "after": found.after, "low": found.low}
    if not found.is_better(lesson.recipe.largest_loss):
        outcome: Any = "harmful" if found.is_harmful else "not_better"
        return LessonResult(outcome=outcome, own=found.own, **measured)
    _end_with(parent_process)
    state = candidate.state_dict()
    folder.write(
        VersionRecord(
            number=lesson.number,
            parent=lesson.parent,
            identity=lesson.identity,
            tenants=tuple(sorted({*inherited, *lesson.tenants})),
            **measured,
        ),
        {name: state[name] for name in adapted_names(candidate)},
    )
    return LessonResult(outcome="better", version=lesson.number, own=found.own, **measured)


def teach(
    target: TargetAdapter,
    drafter: JakiroDrafter,
    lesson: Lesson,
    parent_process: int | None = None,
) -> JakiroDrafter:
    """Return a copy of a drafter that has learned from the texts of a lesson."""
    recipe = lesson.recipe
    pupil = deepcopy(drafter)
    rank, ends = recipe.rank, adapted_ends(pupil)
    settings = LoraSettings(rank=rank, alpha=2 * rank, targets=ends)
    add_adapters(pupil, settings, lesson.seed)
    passages = [cut(passage, recipe.max_length) for passage in lesson.learned]
    length = max(len(passage.token_ids) for passage in passages)
    reader = TargetReader(target, pupil, length, torch.float32)
    module = TrainingModule(pupil, _OBJECTIVE)
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=recipe.learning_rate, weight_decay=0.0)
    num_steps = _num_steps(len(passages), recipe)
    rule = decoding_rule(pupil.config.settings)
    several = batches(passages, recipe.batch_size, recipe.passes, rule, lesson.seed)
    for step, batch in enumerate(several):
        _end_with(parent_process)
        batch = batch.to(target.device)
        optimizer.param_groups[0]["lr"] = recipe.learning_rate * (1 - step / num_steps)
        terms = module(reader.view(batch), batch, reader)
        loss = terms.total / terms.num_positions.clamp(min=1)
        if not bool(loss.isfinite()):
            raise NumericalError("the loss of a lesson is not finite", got=float(loss))
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(weights, 1.0)
        optimizer.step()
    return merged(pupil).eval()


def _num_steps(num_passages: int, recipe: Recipe) -> int:
    return recipe.passes * -(-num_passages // recipe.batch_size)


def _loaded(lesson: Lesson) -> tuple[TargetAdapter, JakiroDrafter]:
    """Return the target and the drafter in single precision, as the server has loaded them."""
    drafter: Any = JakiroDrafter.from_pretrained(lesson.drafter).float().eval()
    record = drafter.config.target_record
    name = lesson.target or record.name_or_path
    device = torch.device(lesson.device)
    model = load_causal_lm(name, dtype=lesson.dtype, device=device).requires_grad_(False)
    target = TargetAdapter(model)
    check_target(record, target.spec, other_weights=lesson.other_weights)
    found = identity_of_drafter(drafter, target.spec.fingerprint, target.dtype)
    if found != lesson.identity:
        raise CheckpointError(
            "the drafter or the target has changed since the server has loaded it",
            expected=lesson.identity,
            got=found,
            remedy="start the server again",
        )
    return target, drafter.to(device)


def _end_with(parent_process: int | None) -> None:
    """End this process if the server that has started it is gone."""
    if parent_process is not None and os.getppid() != parent_process:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
