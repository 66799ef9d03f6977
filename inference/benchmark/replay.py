"""Tau of several drafters on the same texts, which the target writes once.

A deterministic candidate depends only on the tokens before it, and is accepted exactly if it is the
token that the target selects there. The steps of a text therefore follow from the text itself: each
step accepts the path of its tree along which the text goes on. The target reads the whole text in
one pass, instead of a tree in each step, and several drafters can be compared on the same text,
also where tokens are sampled.

Sampled candidates are different: whether they are accepted also depends on the distribution from
which they were sampled, so a text does not determine its steps.
"""

from collections.abc import Iterator, Sequence

import torch
from rich.table import Table

from inference.benchmark.document import Continuation, Decoded, Environment, Sample, environment_of
from inference.benchmark.harness import Harness, Results, Texts
from inference.benchmark.methods import JakiroDecoding, SamplingOptions
from inference.benchmark.report import INTERRUPTED, table_of
from inference.benchmark.run import prompts_for
from inference.benchmark.settings import (
    AUTOREGRESSIVE,
    ComparisonSettings,
    MethodName,
    parse_replayed_methods,
)
from inference.benchmark.stats import TAU, Ratio, product, rate_of, ratio
from inference.benchmark.subject import Subject, build_methods
from inference.engine.batch import remaining
from inference.engine.context import Context
from inference.engine.loop import DecodeRun
from inference.engine.policy import AlwaysDraft
from inference.engine.stats import DecodeStats
from inference.sampling.random_numbers import StepRandom
from jakiro.errors import DataError
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.devices import num_threads
from jakiro.utils.progress import Track, untracked
from jakiro.utils.settings import Settings

LEGEND = (
    "tau: tokens per decoding step, with the 95% interval over prompts and, if there are several, "
    "trainings. An asterisk marks ratios whose interval excludes 1. by depth: share of the steps "
    "with candidates to check at each depth that accepted one of them. Speeds are not measured; "
    "larger trees and slower drafters take more time."
)


class ReplayRow(Settings):
    """Results of a drafter at a temperature.

    Attributes:
        tau: tokens per decoding step, pooled over trainings and prompts, with the 95% interval over
            prompts and, if there are several, trainings; and tau of each training.
        ratio: tau divided by that of the first drafter, with the same kind of interval. The
            trainings of both are paired by their order.
        conditional_acceptance_rate: for each depth, the share of the decoding steps with candidates
            to check at this depth that accepted one of them, pooled over trainings.
        samples: samples of each training. `target_forwards` is the number of decoding steps in
            which the drafter would have produced the text; the seconds say nothing.
    """

    drafter: str
    temperature: float
    tau: Ratio
    ratio: Ratio
    conditional_acceptance_rate: tuple[float, ...]
    samples: tuple[tuple[Sample, ...], ...]


class ReplayDocument(Settings):
    """Results of a replay; `tokens` is the number of tokens of the texts at each temperature.

    After an interruption, only prompts that were replayed with all drafters are included.
    """

    environment: Environment
    settings: ComparisonSettings
    is_complete: bool = True
    tokens: dict[float, int]
    rows: tuple[ReplayRow, ...]


class ReplayedDecoding(JakiroDecoding):
    """A method that gives the answers of `writer`, with the steps that a drafter would have taken.

    Args:
        written: answers of the writer, which all methods with this writer share.
    """

    def __init__(
        self,
        method: JakiroDecoding,
        name: str,
        writer: JakiroDecoding,
        written: dict[object, list[Continuation]],
    ) -> None:
        super().__init__(name, method.kind, method.decoder)
        self.family = method.name
        self._writer, self._written = writer, written

    def decode(self, prompts: list[list[int]], sampling: SamplingOptions, seed: int) -> Decoded:
        """Return the writer's answers, and the counts of the drafter's steps."""
        key = repr((prompts, sampling, seed))
        if key not in self._written:
            self._written[key] = self._writer.decode(prompts, sampling, seed).continuations
        answers = self._written[key]
        run = self.start(prompts, sampling, seed)
        counts = replay(run, [answer.token_ids for answer in answers])
        continuations = [
            answer._replace(stats=stats) for answer, stats in zip(answers, counts, strict=True)
        ]
        return Decoded(continuations, {})


class Replay:
    """A comparison of drafters by the tokens per decoding step that they would have reached."""

    def __init__(self, settings: ComparisonSettings, subject: Subject, name_or_path: str) -> None:
        names = parse_replayed_methods(settings.methods)
        target = TargetAdapter(subject.model)
        self.settings = settings
        self.environment = environment_of(target, name_or_path)
        self.prompts = prompts_for(settings.model_copy(update={"methods": (AUTOREGRESSIVE,)}))
        if len(self.prompts) < 2:
            raise DataError("an interval needs more than one prompt; pass more in --prompts")
        texts = Texts.of(target, subject.tokenizer)
        texts.require_room(self.prompts, settings.max_new_tokens)
        methods = _methods(names, subject)
        self.harness = Harness(methods, settings, texts)
        self.trainings: dict[str, list[str]] = {}
        for method in methods:
            self.trainings.setdefault(method.family, []).append(method.name)

    def run(self, track: Track = untracked) -> ReplayDocument:
        """Write the texts, replay them with each drafter, and return the results.

        Raises:
            DataError: all texts at a temperature end with their first token.
        """
        self.harness.advance = track("Replaying", self.harness.num_groups(self.prompts))
        threads = self.settings.threads  # "auto" is for measurements of speed
        with num_threads(None if threads == "auto" else threads):
            results = self.harness.measure(self.prompts)
        first = self.harness.methods[0].name
        measured = [t for t in self.settings.temperatures if (first, t) in results]
        return ReplayDocument(
            environment=self.environment,
            settings=self.settings,
            is_complete=not self.harness.is_interrupted,
            tokens={t: sum(one.tokens for one in results[first, t]) for t in measured},
            rows=tuple(row for t in measured for row in self._rows(t, results)),
        )

    def _rows(self, temperature: float, results: Results) -> Iterator[ReplayRow]:
        base = None
        for name, trainings in self.trainings.items():
            measured = [results[training, temperature] for training in trainings]
            units = sorted(sample.prompt for sample in measured[0])
            rate = rate_of(measured, TAU, units)
            base = base or rate
            pooled = DecodeStats.pooled(
                answer.stats for samples in measured for one in samples for answer in one.answers
            )
            yield ReplayRow(
                drafter=name,
                temperature=temperature,
                tau=product([(1.0, rate)]),
                ratio=ratio(rate, base),
                conditional_acceptance_rate=tuple(pooled.conditional_acceptance_rate),
                samples=tuple(map(tuple, measured)),
            )


def _methods(names: Sequence[MethodName], subject: Subject) -> list[ReplayedDecoding]:
    writer = JakiroDecoding(AUTOREGRESSIVE, AUTOREGRESSIVE, subject.decoder())
    written: dict[object, list[Continuation]] = {}
    return [
        ReplayedDecoding(method, f"{method.name} ({number})", writer, written)
        for number, method in enumerate(build_methods(names, subject))
        if isinstance(method, JakiroDecoding)
    ]


def replay_tables(document: ReplayDocument) -> Iterator[Table | str]:
    """Yield a note after an interruption, a table for each temperature, and a legend."""
    if not document.is_complete:
        yield INTERRUPTED
    for temperature, num_tokens in document.tokens.items():
        rows = [row for row in document.rows if row.temperature == temperature]
        first = rows[0]
        yield table_of(
            f"T = {temperature:g}; trainings: {len(first.samples)}, prompts: "
            f"{len(first.samples[0])}, tokens: {num_tokens:,}",
            ("drafter", "tau", f"tau / {first.drafter}", "by depth"),
            [
                (
                    row.drafter,
                    row.tau.shown(2),
                    row.ratio.shown(3) + (" *" if row.ratio.is_resolved else ""),
                    " ".join(f"{rate:.2f}" for rate in row.conditional_acceptance_rate),
                )
                for row in rows
            ],
        )
    yield LEGEND


@torch.inference_mode()
def replay(run: DecodeRun, answers: Sequence[Sequence[int]]) -> list[DecodeStats]:
    """Return the counts with which a run would produce given answers, up to rounding.

    Args:
        run: a run that has not started yet, and proposes a deterministic tree of one size in every
            step; it is closed afterwards.
        answers: tokens after the prompt of each request, at least one and at most as many as the
            request allows.
    """
    context = run.context
    try:
        texts = [
            [*state.token_ids, *answer]
            for state, answer in zip(run.sequences, answers, strict=True)
        ]
        starts = [len(state.token_ids) for state in run.sequences]
        _read(context, texts, starts)
        return _steps(run, texts, starts)
    finally:
        run.close()


def _read(context: Context, texts: Sequence[list[int]], starts: Sequence[int]) -> None:
    """Let the target read whole texts, and go back to the ends of the prompts."""
    longest, offset = max(map(len, texts)), 0
    while offset < longest:
        count = min(context.prefill_chunk, longest - offset)
        context.read(texts, offset, count)
        offset += count
    context.lengths = list(starts)


def _steps(run: DecodeRun, texts: list[list[int]], starts: Sequence[int]) -> list[DecodeStats]:
    """Propose trees along the texts, each below the token after those that are cached."""
    context, policy = run.context, run.policy
    assert isinstance(policy, AlwaysDraft)
    assert policy.budget is not None
    assert context.session is not None
    assert not context.session.is_sampled
    last = context.target.spec.max_position - 1
    stats = [DecodeStats(emitted=1) for _ in texts]
    live = list(range(len(texts)))
    lengths = list(starts)
    while True:
        pairs = zip(live, lengths, strict=True)
        kept = remaining([length + 1 < len(texts[index]) for index, length in pairs])
        if not kept:
            return stats
        if len(kept) < len(live):
            context.lengths = [len(texts[index]) for index in live]  # whole texts move
            context.select_sequences(kept)
            live = [live[index] for index in kept]
            lengths = [lengths[index] for index in kept]
        context.lengths = lengths
        begun = [texts[index][: length + 1] for index, length in zip(live, lengths, strict=True)]
        proposed = context.propose(begun, policy.budget, StepRandom()).limited(last)
        for row, tree in enumerate(proposed.to_host()):
            rest = texts[live[row]][lengths[row] + 1 :]
            path = tree.follow(rest)
            count = min(len(path) + 1, len(rest))
            stats[live[row]].count(tree, path, count)
            stats[live[row]].target_forwards += 1
            lengths[row] += count
