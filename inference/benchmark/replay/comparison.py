"""Comparison of several drafters on the same texts, which the target writes once."""

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from inference.autotune.search import trees_of_size
from inference.benchmark.harness import Harness, Texts, grouped
from inference.benchmark.machine import environment_of
from inference.benchmark.method_names import AUTOREGRESSIVE, DRAFTER
from inference.benchmark.methods import OwnDecoding
from inference.benchmark.replay.document import (
    ReplayDocument,
    ReplayedCategory,
    ReplayedPrompt,
    ReplayRow,
    ReplaySettings,
)
from inference.benchmark.replay.names import Size, Training, trainings_of
from inference.benchmark.replay.steps import replay
from inference.benchmark.run import prompts_for
from inference.benchmark.settings import ComparisonSettings
from inference.benchmark.stats import FEWEST_PROMPTS, Rate, product, ratio
from inference.benchmark.subject import Subject
from inference.engine.stats import DecodeStats
from inference.generation.prompt_file import BenchPrompt
from inference.trees.shape import TreePlan
from jakiro.drafter import JakiroDrafter
from jakiro.errors import ConfigError
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.tracking import Track, untracked

_FEWEST_PROMPTS = 2


def prompts_of(settings: ReplaySettings) -> list[BenchPrompt]:
    """Return the prompts of a replay, without duplicates.

    Raises:
        PromptError: the prompts cannot be used.
        ConfigError: there is only one prompt.
    """
    prompts = prompts_for(_decoding(settings))
    if len(prompts) < _FEWEST_PROMPTS:
        raise ConfigError(
            "an interval needs more than one prompt",
            expected=f"{_FEWEST_PROMPTS} or more different prompts",
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


_Key = tuple[Training, str]  # a training and the size of its trees
_Tally = dict[str, list[DecodeStats]]  # for each prompt's hash, the counts of all its chat turns


class _Replayed(NamedTuple):
    """The replays at a temperature."""

    prompts: set[str]  # hashes of the prompts that all drafters have replayed
    tallies: dict[_Key, _Tally]  # may also contain other prompts

    def turns(self, prompt: str) -> list[DecodeStats]:
        """Return the counts of the first drafter, whose texts are those of all drafters."""
        return next(iter(self.tallies.values()))[prompt]

    @property
    def has_enough(self) -> bool:
        """Whether these prompts are enough for an interval."""
        decoded = (any(turn.decoded for turn in self.turns(own)) for own in self.prompts)
        return sum(decoded) >= _FEWEST_PROMPTS

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the texts that all drafters have replayed."""
        return sum(turn.emitted for own in self.prompts for turn in self.turns(own))


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
        ConfigError: a drafter or a size of trees cannot be used.
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
        self._trainings = trainings_of(settings)
        self._methods = _methods(settings, self._trainings, subject)
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

        After an interruption, the results contain only prompts that all drafters have replayed, and
        only temperatures with enough such prompts for an interval.

        Args:
            track: function that is called with the name and the number of steps of each part, and
                returns a function that is called after each step.

        Raises:
            DataError: all texts at a temperature end with their first token.
            KeyboardInterrupt: the replay was interrupted before there were enough prompts.
        """
        temperatures = self.settings.temperatures
        every = {t: _Replayed(set(), {key: {} for key in self._methods}) for t in temperatures}
        is_complete = True
        try:
            self._replay_all(every, track)
        except KeyboardInterrupt:
            is_complete = False
            every = {t: own for t, own in every.items() if own.has_enough}
            if not every:
                raise
        return ReplayDocument(
            environment=self.environment,
            settings=self.settings,
            is_complete=is_complete,
            prompts=max(len(own.prompts) for own in every.values()),
            tokens={temperature: own.num_tokens for temperature, own in every.items()},
            rows=tuple(row for t, own in every.items() for row in self._rows(t, own)),
        )

    def _replay_all(self, every: dict[float, _Replayed], track: Track) -> None:
        """Replay all groups of prompts in a random order, and note which ones are finished."""
        groups = grouped(self.prompts, self._harness.settings)
        advance = track("Replaying", len(every) * len(groups) * (1 + len(self._methods)))
        seed = self.settings.seed
        for number in random.Random(seed).sample(range(len(groups)), len(groups)):
            for temperature, replayed in every.items():
                texts = self._written(groups[number], temperature, seed + 1000 * number)
                advance()
                for key, method in self._methods.items():
                    self._replay(method, texts, temperature, replayed.tallies[key])
                    advance()
                replayed.prompts.update(prompt.fingerprint for prompt in groups[number])

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
        sampling, size = self._harness.sampling(temperature), self.settings.batch_size
        for begin in range(0, len(texts), size):
            some = texts[begin : begin + size]
            run = method.start([text.prompt_ids for text in some], sampling, self.settings.seed)
            counts = replay(run, [text.answer for text in some])
            for text, stats in zip(some, counts, strict=True):
                tally.setdefault(text.prompt.fingerprint, []).append(stats)

    def _rows(self, temperature: float, replayed: _Replayed) -> Iterator[ReplayRow]:
        prompts = [own for own in self.prompts if own.fingerprint in replayed.prompts]
        by_name: dict[str, list[Training]] = {}
        for training in self._trainings:
            by_name.setdefault(training.name, []).append(training)
        for trees in self.settings.trees:
            base: _Counts | None = None
            for name, trainings in by_name.items():
                stats = [
                    [replayed.tallies[training, trees][own.fingerprint] for own in prompts]
                    for training in trainings
                ]
                counts = [list(map(_counts, prompts, own)) for own in stats]
                base = base or counts
                pooled = DecodeStats.pooled(
                    turn for own in stats for prompt in own for turn in prompt
                )
                yield ReplayRow(
                    drafter=name,
                    temperature=temperature,
                    trees=trees,
                    tau=product([(1.0, _rate(counts))]),
                    ratio=ratio(_rate(counts), _rate(base)),
                    conditional_acceptance_rate=tuple(pooled.conditional_acceptance_rate),
                    counts=tuple(map(tuple, counts)),
                    categories=_categories(counts, base),
                )


_Counts = Sequence[Sequence[ReplayedPrompt]]  # of several trainings, for each prompt


def _categories(counts: _Counts, base: _Counts) -> dict[str, ReplayedCategory]:
    """Return the results by category, if there are several, for those with enough prompts."""
    names = dict.fromkeys(prompt.category for prompt in counts[0])
    if len(names) == 1:
        return {}
    own, first = ({name: _of(every, name) for name in names} for every in (counts, base))
    return {
        name: ReplayedCategory(
            prompts=len(several[0]),
            tau=product([(1.0, _rate(several))]),
            ratio=ratio(_rate(several), _rate(first[name])),
        )
        for name, several in own.items()
        if sum(prompt.decoded > 0 for prompt in several[0]) >= FEWEST_PROMPTS
    }


def _of(counts: _Counts, category: str) -> _Counts:
    """Return the counts of the prompts of one category."""
    return [[own for own in training if own.category == category] for training in counts]


def _rate(counts: _Counts) -> Rate:
    """Return tau of several trainings: tokens and decoding steps of each prompt."""
    decoded = [[own.decoded for own in training] for training in counts]
    steps = [[own.steps for own in training] for training in counts]
    return Rate(np.array(decoded, np.float64), np.array(steps, np.float64))


def _counts(prompt: BenchPrompt, stats: Sequence[DecodeStats]) -> ReplayedPrompt:
    total = DecodeStats.pooled(stats)
    return ReplayedPrompt(
        prompt=prompt.fingerprint,
        category=prompt.category,
        decoded=total.decoded,
        steps=total.target_forwards,
    )


def _methods(
    settings: ReplaySettings, trainings: Sequence[Training], subject: Subject
) -> dict[_Key, OwnDecoding]:
    """Return a decoding method for each training and size of trees."""
    methods = {}
    for training in trainings:
        drafter = JakiroDrafter.from_pretrained(training.path)
        for text in settings.trees:
            size = Size.parse(text)
            plan = trees_of_size(drafter, size.candidates, size.levels)
            decoder = subject.decoder(drafter, TreePlan.of(plan.greedy))
            methods[training, text] = OwnDecoding(training.name, DRAFTER, decoder)
    return methods
