"""The program that learns from one lesson, and writes a version if it drafts better.

`jakiro serve --adapt shared` starts it, writes the lesson to its standard input, and stops it with
signals while requests are decoded. It may be killed at any time: a version is written whole, or not
at all.
"""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils import clip_grad_norm_

from inference.adaptation.lesson import Lesson, LessonResult, Passage, Recipe, read_lesson
from inference.adaptation.versions import VersionFolder, VersionRecord
from inference.adaptation.weights import (
    ReplaceableWeights,
    adapted_ends,
    adapted_names,
    identity_of_drafter,
)
from inference.benchmark.stats import Floats, Rate, ratio
from inference.decoder import SpeculativeDecoder
from inference.drafters.trained.drafter import TrainedDrafter
from jakiro.drafter import JakiroDrafter
from jakiro.errors import CheckpointError, JakiroError, NumericalError
from jakiro.target.adapter import TargetAdapter
from jakiro.target.record import check_target
from jakiro.utils.logs import quiet_libraries
from jakiro.utils.pretrained import load_causal_lm
from training.config import decoding_rule
from training.data.packing import PackedSequence, collate
from training.input_settings import LoraSettings
from training.launch import end_with_parent
from training.loss.anchors import AnchorRule
from training.loss.batch import Batch
from training.loss.settings import ObjectiveSettings
from training.module import TargetReader, TrainingModule
from training.setup.adapters import add_adapters, merged

FEWEST = 4  # with fewer prompts, no version is ever better
_NICENESS = 19  # the lowest priority

# Forward KL alone, as in arXiv 2310.07177, because only the draft distribution affects acceptance.
_OBJECTIVE = ObjectiveSettings(
    token_weight=1.0, token_loss="kl", feature_weight=0.0, contrast_weight=0.0
)


def cut(passage: Passage, max_length: int) -> Passage:
    """Return a passage of at most `max_length` tokens, whose continuation begins where it began.

    The continuation loses its end, but keeps half of `max_length` or what fits after the prompt.
    Then the prompt loses its beginning.
    """
    room = max(max_length // 2, max_length - passage.prompt_length)
    ids = passage.token_ids[: passage.prompt_length + room]
    start = max(len(ids) - max_length, 0)
    return Passage(token_ids=ids[start:], prompt_length=passage.prompt_length - start)


def batches(
    passages: Sequence[Passage], size: int, passes: int, rule: AnchorRule, seed: int
) -> Iterator[Batch]:
    """Yield batches of all passages, each time in another random order."""
    for number in range(passes):
        order = np.random.default_rng((seed, number)).permutation(len(passages))
        for begin in range(0, len(order), size):
            indices = [int(index) for index in order[begin : begin + size]]
            length = max(len(passages[index].token_ids) for index in indices)
            keyed = [(_row(passages[index], length), (seed, number, index)) for index in indices]
            yield collate(
                (row, rule.anchors(row.document_starts, key, row.is_response)) for row, key in keyed
            )


def _row(passage: Passage, length: int) -> PackedSequence:
    """Return a passage with padding at its end; the drafter learns the continuation only."""
    count = len(passage.token_ids)
    index = np.arange(length)
    token_ids = np.zeros(length, np.int64)
    token_ids[:count] = passage.token_ids
    is_padding = index >= count
    return PackedSequence(
        token_ids=token_ids,
        positions=np.where(is_padding, index - count, index),
        documents=np.where(is_padding, -1, 0),
        is_response=(index >= passage.prompt_length) & ~is_padding,
    )


class GateResult(NamedTuple):
    """The tau of three drafters on the same prompts.

    Attributes:
        low: lower end of the 95% interval of after / before.
        older: on the older half of the prompts, the smaller one of after / before and after / own.
        harm: lower end of the 95% interval of own / before.
    """

    own: float
    before: float
    after: float
    low: float
    older: float
    harm: float

    def is_better(self, largest_loss: float) -> bool:
        """Return whether the new drafter is better beyond noise, without a loss on older prompts.

        It must not be worse than the drafter itself either, so that small losses do not add up.
        """
        return self.low > 1 and self.after >= self.own and self.older >= 1 - largest_loss

    @property
    def is_harmful(self) -> bool:
        """Whether what the drafter in use has learned does harm, beyond noise."""
        return self.harm > 1


class Drafters(NamedTuple):
    """Drafters that are compared."""

    own: JakiroDrafter
    current: JakiroDrafter
    candidate: JakiroDrafter


def compare_drafters(
    target: TargetAdapter, drafters: Drafters, held_out: Sequence[Passage], recipe: Recipe
) -> GateResult:
    """Compare drafters by greedy decoding, alternately, of prompts that none of them has learned.

    All give the same texts, so only the numbers of decoding steps differ.
    """
    decoders = {id(drafter): _decoder(target, drafter) for drafter in drafters}
    counts = {key: np.zeros((2, len(held_out))) for key in decoders}  # tokens or steps, prompt
    for number, passage in enumerate(held_out):
        prompt = list(passage.token_ids[: passage.prompt_length])[-recipe.max_length :]
        room = target.spec.max_position - len(prompt)
        for key, decoder in decoders.items():
            new = min(recipe.compared_tokens, room)
            stats = decoder.generate(prompt, max_new_tokens=new, temperature=0).stats
            counts[key][:, number] = stats.decoded, stats.target_forwards
    return compare_counts(*(counts[id(drafter)] for drafter in drafters))


def compare_counts(own: Floats, before: Floats, after: Floats) -> GateResult:
    """Return the result for numbers of tokens and decoding steps."""
    taus = {"own": _tau(own), "before": _tau(before), "after": _tau(after)}
    if own.shape[1] < FEWEST or not own.sum():
        return GateResult(**taus, low=0.0, older=0.0, harm=0.0)
    half = own.shape[1] // 2
    older = [_tau(counts[:, :half]) for counts in (own, before, after)]
    return GateResult(
        **taus,
        low=_low(before, after),
        older=older[2] / max(older[0], older[1]),
        harm=_low(before, own),
    )


def _low(before: Floats, after: Floats) -> float:
    new, old = (Rate(counts[:1], counts[1:]) for counts in (after, before))
    return ratio(new, old).low


def _tau(counts: Floats) -> float:
    tokens, steps = counts.sum(axis=1)
    return float(tokens / steps) if steps else 1.0


def _decoder(target: TargetAdapter, drafter: JakiroDrafter) -> SpeculativeDecoder:
    used = TrainedDrafter.for_target(deepcopy(drafter), target, forms=(), other_weights=True)
    return SpeculativeDecoder(target.model, used, tree="fixed")


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
    """
    parent_process = parent_process or os.getppid()
    folder = VersionFolder(lesson.folder, lesson.identity)
    target, own = _load(lesson)
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
    gate = compare_drafters(target, drafters, lesson.held_out, lesson.recipe)
    measured = {"before": gate.before, "after": gate.after, "low": gate.low}
    if not gate.is_better(lesson.recipe.largest_loss):
        outcome: Any = "harmful" if gate.is_harmful else "not_better"
        return LessonResult(outcome=outcome, own=gate.own, **measured)
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
    return LessonResult(outcome="better", version=lesson.number, own=gate.own, **measured)


def teach(
    target: TargetAdapter,
    drafter: JakiroDrafter,
    lesson: Lesson,
    parent_process: int | None = None,
) -> JakiroDrafter:
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
    num_steps = recipe.passes * -(-len(passages) // recipe.batch_size)
    rule = decoding_rule(pupil.config.settings)
    in_order = batches(passages, recipe.batch_size, recipe.passes, rule, lesson.seed)
    for step, batch in enumerate(in_order):
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


def _load(lesson: Lesson) -> tuple[TargetAdapter, JakiroDrafter]:
    """Return the target and the drafter in single precision, as the server has loaded them."""
    drafter: Any = JakiroDrafter.from_pretrained(lesson.drafter).float().eval()
    record = drafter.config.target_record
    name = lesson.target or record.name_or_path
    device = torch.device(lesson.device)
    model = load_causal_lm(name, dtype=lesson.dtype, device=device).requires_grad_(False)
    target = TargetAdapter(model)
    check_target(record, target.spec, other_weights=lesson.other_weights)
    identity = identity_of_drafter(drafter, target.spec.fingerprint, target.dtype)
    if identity != lesson.identity:
        raise CheckpointError(
            "the drafter or the target has changed since the server has loaded it",
            expected=lesson.identity,
            got=identity,
            remedy="start the server again",
        )
    return target, drafter.to(device)


def _end_with(parent_process: int | None) -> None:
    """End this process if the server that has started it is gone."""
    if parent_process is not None and os.getppid() != parent_process:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
