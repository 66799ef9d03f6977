"""Comparison of several drafters on the same texts, which the target writes once."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from inference.benchmark.harness import Harness, Texts, grouped
from inference.benchmark.machine import environment_of
from inference.benchmark.method_names import AUTOREGRESSIVE, DRAFTER, MethodName, parse_methods
from inference.benchmark.methods import OwnDecoding
from inference.benchmark.replay.document import (
    ReplayDocument,
    ReplayedPrompt,
    ReplayRow,
    ReplaySettings,
)
from inference.benchmark.replay.steps import replay
from inference.benchmark.run import prompts_for
from inference.benchmark.settings import ComparisonSettings
from inference.benchmark.stats import Floats, Rate, product, ratio
from inference.benchmark.subject import Subject, build_methods
from inference.engine.stats import DecodeStats
from inference.generation.prompt_file import BenchPrompt
from jakiro.errors import ConfigError
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.tracking import Track, untracked

FEWEST_PROMPTS = 2
_TREES = re.compile(r"(candidates|levels)=\d+(,(candidates|levels)=\d+)?")


class Training(NamedTuple):
    """A trained drafter with one kind of trees.

    Attributes:
        name: name of the drafter, which other trainings with other seeds have, too.
        trees: the kind of trees.
        method: name of the decoding method.
    """

    name: str
    trees: str
    method: MethodName


def trainings_of(settings: ReplaySettings) -> list[Training]:
    """Return all trained drafters with each kind of trees; the models need not exist.

    Raises:
        ConfigError: a kind of trees is malformed, or the drafters have different numbers of
            trainings.
    """
    for trees in settings.trees:
        if _TREES.fullmatch(trees) is None:
            raise ConfigError(
                f"--trees {trees} cannot be used",
                expected="candidates=N, or candidates=N,levels=M; candidates are deterministic",
                got=trees,
            )
    named = [_named(text) for text in settings.drafters]
    names = [name for name, _ in named]
    if len({names.count(name) for name in names}) > 1:
        raise ConfigError(
            "the drafters have different numbers of trainings",
            expected="as many paths for each name",
            got=", ".join(f"{name}: {names.count(name)}" for name in dict.fromkeys(names)),
            remedy="pass --drafter NAME=PATH for each seed of each drafter",
        )
    pairs = [(name, path, trees) for trees in settings.trees for name, path in named]
    methods = parse_methods(
        [
            f"{DRAFTER}={path},tree=deterministic,{trees},name={number}"
            for number, (_, path, trees) in enumerate(pairs)
        ]
    )
    return [
        Training(name, trees, method)
        for (name, _, trees), method in zip(pairs, methods, strict=True)
    ]


def _named(text: str) -> tuple[str, str]:
    """Return the name and the path of a drafter, given `NAME=PATH` or `PATH`."""
    name, separator, path = text.partition("=")
    if Path(text).exists() or not separator:
        return Path(text).name, text
    return name, path


def prompts_of(settings: ReplaySettings) -> list[BenchPrompt]:
    """Return the prompts of a replay, without duplicates.

    Raises:
        PromptError: the prompts cannot be used.
        ConfigError: there is only one prompt.
    """
    prompts = prompts_for(_decoding(settings))
    if len(prompts) < FEWEST_PROMPTS:
        raise ConfigError(
            "an interval needs more than one prompt",
            expected=f"{FEWEST_PROMPTS} or more different prompts",
            got=len(prompts),
            remedy="add prompts to the file of --prompts, or raise --num-prompts",
        )
    return prompts


def _decoding(settings: ReplaySettings) -> ComparisonSettings:
    """Return the settings with which the target writes the texts."""
    shared = settings.model_dump(exclude={"drafters", "trees", "other_weights"})
    return ComparisonSettings(methods=(AUTOREGRESSIVE,), **shared)


class _Text(NamedTuple):
    """An answer of the target to a chat turn of a prompt."""

    prompt: BenchPrompt
    prompt_ids: list[int]
    answer: list[int]


# For each prompt's hash, the counts of all its chat turns.
_Tally = dict[str, list[DecodeStats]]


class Replay:
    """A comparison of drafters by the tokens per decoding step that they would have reached.

    Args:
        settings: settings of the comparison.
        prompts: prompts without duplicates, as returned by `prompts_of`.
        subject: the target, and how it computes.
        name_or_path: folder or hub id that the target was loaded from.

    Raises:
        CheckpointError: a drafter cannot be loaded.
        TargetMismatch: a drafter belongs to a different target.
        PromptError: a prompt cannot be encoded, or leaves no room for its answers.
    """

    def __init__(
        self,
        settings: ReplaySettings,
        prompts: Sequence[BenchPrompt],
        subject: Subject,
        name_or_path: str,
    ) -> None:
        self.settings = settings
        self.prompts = prompts
        self.trainings = trainings_of(settings)
        self._methods = [
            method
            for method in build_methods([own.method for own in self.trainings], subject)
            if isinstance(method, OwnDecoding)
        ]
        target = TargetAdapter(subject.model)
        self.environment = environment_of(target, name_or_path)
        self._harness = Harness(
            [OwnDecoding(AUTOREGRESSIVE, AUTOREGRESSIVE, subject.decoder())],
            _decoding(settings),
            Texts.of(target, subject.tokenizer, settings.max_new_tokens),
            target.device,
        )
        self._harness.texts.require_room(prompts, settings.max_new_tokens)

    def run(self, track: Track = untracked) -> ReplayDocument:
        """Write the texts, replay them with each drafter, and return the results.

        Args:
            track: function that is called with the name and the number of steps of each part, and
                returns a function that is called after each step.
        """
        groups = grouped(self.prompts, self._harness.settings)
        temperatures = self.settings.temperatures
        tallies: dict[tuple[int, float], _Tally] = {}
        num_tokens = dict.fromkeys(temperatures, 0)
        advance = track("Replaying", len(temperatures) * len(groups) * (1 + len(self._methods)))
        for temperature in temperatures:
            for number, group in enumerate(groups):
                texts = self._written(group, temperature, self.settings.seed + 1000 * number)
                num_tokens[temperature] += sum(len(text.answer) for text in texts)
                advance()
                for index, method in enumerate(self._methods):
                    tally = tallies.setdefault((index, temperature), {})
                    self._replay(method, texts, temperature, tally)
                    advance()
        return ReplayDocument(
            environment=self.environment,
            settings=self.settings,
            prompts=len(self.prompts),
            tokens=num_tokens,
            rows=tuple(self._rows(tallies)),
        )

    def _written(self, group: Sequence[BenchPrompt], temperature: float, seed: int) -> list[_Text]:
        """Return the target's answers to all chat turns of a group of prompts."""
        harness = self._harness
        (method,) = harness.methods
        samples, _ = harness.samples(method, group, harness.sampling(temperature), seed)
        return [
            _Text(sample.prompt, harness.encoded(sample.prompt, sample.turns[:turn]), answer)
            for sample in samples
            for turn, answer in enumerate(sample.token_ids)
        ]

    def _replay(
        self, method: OwnDecoding, texts: Sequence[_Text], temperature: float, tally: _Tally
    ) -> None:
        sampling = self._harness.sampling(temperature)
        run = method.start([text.prompt_ids for text in texts], sampling, self.settings.seed)
        for text, stats in zip(texts, replay(run, [text.answer for text in texts]), strict=True):
            tally.setdefault(text.prompt.fingerprint, []).append(stats)

    def _rows(self, tallies: dict[tuple[int, float], _Tally]) -> Iterator[ReplayRow]:
        names = list(dict.fromkeys(training.name for training in self.trainings))
        for temperature in self.settings.temperatures:
            for trees in self.settings.trees:
                base: Rate | None = None
                for name in names:
                    own = [
                        tallies[index, temperature]
                        for index, training in enumerate(self.trainings)
                        if (training.name, training.trees) == (name, trees)
                    ]
                    rate = self._rate(own)
                    base = base or rate
                    yield self._row(name, temperature, trees, own, rate, base)

    def _row(
        self,
        name: str,
        temperature: float,
        trees: str,
        tallies: Sequence[_Tally],
        rate: Rate,
        base: Rate,
    ) -> ReplayRow:
        pooled = DecodeStats.pooled(
            stats for tally in tallies for several in tally.values() for stats in several
        )
        return ReplayRow(
            drafter=name,
            temperature=temperature,
            trees=trees,
            tau=product([(1.0, rate)]),
            ratio=ratio(rate, base),
            conditional_acceptance_rate=tuple(pooled.conditional_acceptance_rate),
            counts=tuple(
                tuple(_counts(prompt, tally[prompt.fingerprint]) for prompt in self.prompts)
                for tally in tallies
            ),
        )

    def _rate(self, tallies: Sequence[_Tally]) -> Rate:
        """Return tau of several trainings: tokens and decoding steps of each prompt."""

        def summed(field: str) -> Floats:
            rows = [
                [
                    sum(getattr(stats, field) for stats in tally[prompt.fingerprint])
                    for prompt in self.prompts
                ]
                for tally in tallies
            ]
            return np.array(rows, dtype=np.float64)

        return Rate(summed("decoded"), summed("target_forwards"))


def _counts(prompt: BenchPrompt, stats: Sequence[DecodeStats]) -> ReplayedPrompt:
    total = DecodeStats.pooled(stats)
    return ReplayedPrompt(
        prompt=prompt.fingerprint,
        category=prompt.category,
        decoded=total.decoded,
        steps=total.target_forwards,
    )
