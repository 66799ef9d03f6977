"""Comparison of several drafters on the same texts, which the target writes once."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from pydantic import NonNegativeInt
from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from inference.autotune.search import trees_of_size
from inference.benchmark.document import Environment
from inference.benchmark.harness import Harness, Texts, grouped
from inference.benchmark.machine import environment_of
from inference.benchmark.method_names import (
    AUTOREGRESSIVE,
    DRAFTER,
    MethodName,
    parse_replayed_methods,
)
from inference.benchmark.methods import OwnDecoding
from inference.benchmark.replay.steps import replay
from inference.benchmark.run import prompts_for
from inference.benchmark.settings import ComparisonSettings
from inference.benchmark.stats import Rate, Ratio, product, ratio
from inference.benchmark.subject import Subject
from inference.engine.stats import DecodeStats
from inference.generation.prompt_file import BenchPrompt
from inference.trees.shape import TreePlan
from jakiro.drafter import JakiroDrafter
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.progress import Track, untracked
from jakiro.utils.settings import Settings

_CANDIDATES = 60  # of a tree, unless a method says otherwise
LEGEND = (
    "tau: tokens per decoding step, with the 95% interval over prompts and, if there are several, "
    "trainings. An asterisk marks ratios whose interval excludes 1. by depth: share of the steps "
    "with candidates to check at each depth that accepted one of them. Speeds are not measured; "
    "larger trees and slower drafters take more time."
)


class ReplayedPrompt(Settings):
    """Counts of a prompt, summed over its chat turns.

    Attributes:
        decoded: number of tokens after the first one of each chat turn, which prefill delivers.
        steps: number of decoding steps in which the trained drafter would have produced them.
    """

    prompt: str
    category: str
    decoded: NonNegativeInt
    steps: NonNegativeInt


class ReplayRow(Settings):
    """Results of a drafter at a temperature.

    Attributes:
        tau: tokens per decoding step, pooled over trainings and prompts, with the 95% interval over
            prompts and, if there are several, trainings; and tau of each training.
        ratio: tau divided by that of the first drafter, with the same kind of interval. The
            trainings of both are paired by their order.
        conditional_acceptance_rate: for each depth, the share of the decoding steps with candidates
            to check at this depth that accepted one of them, pooled over trainings.
    """

    drafter: str
    temperature: float
    tau: Ratio
    ratio: Ratio
    conditional_acceptance_rate: tuple[float, ...]
    counts: tuple[tuple[ReplayedPrompt, ...], ...]


class ReplayDocument(Settings):
    """Results of a replay; `tokens` is the number of tokens of the texts at each temperature."""

    environment: Environment
    settings: ComparisonSettings
    tokens: dict[float, int]
    rows: tuple[ReplayRow, ...]


class _Text(NamedTuple):
    """An answer of the target to a chat turn of a prompt."""

    prompt: BenchPrompt
    prompt_ids: list[int]
    answer: list[int]


_Tally = dict[str, list[DecodeStats]]  # for each prompt's hash, the counts of all its chat turns


class Replay:
    """A comparison of drafters by the tokens per decoding step that they would have reached."""

    def __init__(self, settings: ComparisonSettings, subject: Subject, name_or_path: str) -> None:
        names = parse_replayed_methods(settings.methods)
        self.settings = settings
        self.methods = [_method(name, subject) for name in names]
        target = TargetAdapter(subject.model)
        self.environment = environment_of(target, name_or_path)
        writing = settings.model_copy(update={"methods": (AUTOREGRESSIVE,)})
        self.prompts = prompts_for(writing)
        self.harness = Harness(
            [OwnDecoding(AUTOREGRESSIVE, AUTOREGRESSIVE, subject.decoder())],
            writing,
            Texts.of(target, subject.tokenizer, settings.max_new_tokens),
            target.device,
        )
        self.harness.texts.require_room(self.prompts, settings.max_new_tokens)

    def run(self, track: Track = untracked) -> ReplayDocument:
        """Write the texts, replay them with each drafter, and return the results.

        Raises:
            DataError: there is only one prompt, or all texts at a temperature end with their first
                token.
        """
        temperatures, seed = self.settings.temperatures, self.settings.seed
        tallies: dict[float, list[_Tally]] = {t: [{} for _ in self.methods] for t in temperatures}
        groups = grouped(self.prompts, self.harness.settings)
        advance = track("Replaying", len(temperatures) * len(groups) * (1 + len(self.methods)))
        for number, group in enumerate(groups):
            for temperature in temperatures:
                texts = self._write(group, temperature, seed + 1000 * number)
                advance()
                for method, tally in zip(self.methods, tallies[temperature], strict=True):
                    self._replay(method, texts, temperature, tally)
                    advance()
        return ReplayDocument(
            environment=self.environment,
            settings=self.settings,
            tokens={
                temperature: sum(turn.emitted for turns in first.values() for turn in turns)
                for temperature, (first, *_) in tallies.items()
            },
            rows=tuple(row for t, tally in tallies.items() for row in self._rows(t, tally)),
        )

    def _write(self, group: Sequence[BenchPrompt], temperature: float, seed: int) -> list[_Text]:
        """Return the target's answers to all chat turns of a group of prompts."""
        (method,) = self.harness.methods
        sampling = self.harness.sampling(temperature)
        samples, _ = self.harness.samples(method, group, sampling, seed)
        return [
            _Text(sample.prompt, self.harness.encoded(sample.prompt, sample.turns[:turn]), answer)
            for sample in samples
            for turn, answer in enumerate(sample.token_ids)
        ]

    def _replay(
        self, method: OwnDecoding, texts: Sequence[_Text], temperature: float, tally: _Tally
    ) -> None:
        sampling, size = self.harness.sampling(temperature), self.settings.batch_size
        for begin in range(0, len(texts), size):
            some = texts[begin : begin + size]
            run = method.start([text.prompt_ids for text in some], sampling, self.settings.seed)
            counts = replay(run, [text.answer for text in some])
            for text, stats in zip(some, counts, strict=True):
                tally.setdefault(text.prompt.fingerprint, []).append(stats)

    def _rows(self, temperature: float, tallies: list[_Tally]) -> Iterator[ReplayRow]:
        trainings: dict[str, list[_Tally]] = {}
        for method, tally in zip(self.methods, tallies, strict=True):
            trainings.setdefault(method.name, []).append(tally)
        base: Rate | None = None
        for name, several in trainings.items():
            counts = [[_counts(prompt, tally) for prompt in self.prompts] for tally in several]
            rate = Rate(
                np.array([[own.decoded for own in training] for training in counts], np.float64),
                np.array([[own.steps for own in training] for training in counts], np.float64),
            )
            base = base or rate
            pooled = DecodeStats.pooled(
                turn for tally in several for turns in tally.values() for turn in turns
            )
            yield ReplayRow(
                drafter=name,
                temperature=temperature,
                tau=product([(1.0, rate)]),
                ratio=ratio(rate, base),
                conditional_acceptance_rate=tuple(pooled.conditional_acceptance_rate),
                counts=tuple(map(tuple, counts)),
            )


def _method(name: MethodName, subject: Subject) -> OwnDecoding:
    drafter = JakiroDrafter.from_pretrained(str(name.path))
    plan = trees_of_size(drafter, name.candidates or _CANDIDATES, name.levels)
    decoder = subject.decoder(drafter, TreePlan.of(plan.greedy))
    return OwnDecoding(name.name, DRAFTER, decoder)


def _counts(prompt: BenchPrompt, tally: _Tally) -> ReplayedPrompt:
    total = DecodeStats.pooled(tally[prompt.fingerprint])
    return ReplayedPrompt(
        prompt=prompt.fingerprint,
        category=prompt.category,
        decoded=total.decoded,
        steps=total.target_forwards,
    )


def replay_tables(document: ReplayDocument) -> Iterator[RenderableType]:
    """Yield a table for each temperature, and a legend."""
    for temperature, num_tokens in document.tokens.items():
        rows = [row for row in document.rows if row.temperature == temperature]
        first = rows[0]
        table = Table(
            title=f"T = {temperature:g}; trainings: {len(first.counts)}, "
            f"prompts: {len(first.counts[0])}, tokens: {num_tokens:,}",
            box=box.SIMPLE_HEAD,
        )
        # Brackets in a name would otherwise be read as markup.
        for title in ("drafter", "tau", f"tau / {first.drafter}", "by depth"):
            table.add_column(Text(title), overflow="fold")
        for row in rows:
            depths = " ".join(f"{rate:.2f}" for rate in row.conditional_acceptance_rate)
            mark = " *" if row.ratio.is_resolved else ""
            cells = row.drafter, _figure(row.tau, 2), _figure(row.ratio, 3) + mark, depths
            table.add_row(*map(Text, cells))
        yield table
    yield LEGEND


def _figure(figure: Ratio, decimals: int) -> str:
    low, high = f"{figure.low:.{decimals}f}", f"{figure.high:.{decimals}f}"
    return f"{figure.value:.{decimals}f} [{low}, {high}]"
