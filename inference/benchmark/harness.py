"""Interleaved measurement of decoding methods on the same prompts.

All methods run in a single process on the same token ids, after a warm-up that is not measured. The
groups of prompts are decoded in random order, with a new random order of temperatures and methods
for every group, so that a drift of the machine's speed affects all of them equally. Adaptive
methods are reset before every group, unless the settings keep their state. In that case, one
temperature is measured after another, so that texts of one do not teach methods for the other.
"""

import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from inference.benchmark.document import Continuation, Sample, now
from inference.benchmark.methods import Method, SamplingOptions
from inference.benchmark.settings import ComparisonSettings
from inference.generation.prompt_file import BenchPrompt
from inference.generation.prompts import Prompt, encode_prompt
from jakiro.errors import PromptError
from jakiro.target.adapter import TargetAdapter
from jakiro.utils.token_text import text_of_tokens

Encode = Callable[[Prompt], list[int]]
Decode = Callable[[list[int]], str]
Results = dict[tuple[str, float], list[Sample]]  # of each method at each temperature


class Texts(NamedTuple):
    """Conversion of prompts to token ids, and of token ids to text."""

    encode: Encode
    decode: Decode
    max_position: int = sys.maxsize  # of the target

    @classmethod
    def of(cls, target: TargetAdapter, tokenizer: PreTrainedTokenizerBase) -> "Texts":
        """Return the conversion by a target's tokenizer."""
        return cls(
            lambda prompt: encode_prompt(prompt, tokenizer, target.spec.vocab_size),
            lambda ids: text_of_tokens(tokenizer, ids),
            target.spec.max_position,
        )

    def require_room(self, prompts: Sequence[BenchPrompt], max_new_tokens: int) -> None:
        """Raise an error if a prompt is unusable, or too long for its answers."""
        for number, prompt in enumerate(prompts, start=1):
            answers = [""] * len(prompt.later_turns)
            written = prompt.num_turns * max_new_tokens
            length = len(self.encode(prompt.chat_turn(answers))) + written
            if length > self.max_position:
                raise PromptError(
                    f"prompt {number} and its answers do not fit into the target's context of "
                    f"{self.max_position} tokens: there are {length}, of which {written} are new"
                )


class Harness:
    """A harness that measures several methods on the same prompts."""

    def __init__(
        self,
        methods: Sequence[Method],
        settings: ComparisonSettings,
        texts: Texts,
        advance: Callable[[], None] = lambda: None,
    ) -> None:
        self.methods = methods
        self.settings = settings
        self.texts = texts
        self.advance = advance
        self.is_interrupted = False

    def measure(self, prompts: Sequence[BenchPrompt]) -> Results:
        """Return the measurements of every method at every temperature.

        After an interruption, the results contain only groups that all methods have decoded.

        Raises:
            KeyboardInterrupt: the measurement was interrupted before all methods had decoded the
                same group.
        """
        groups = group_prompts(prompts, self.settings)
        results: Results = {}
        every = self.settings.temperatures
        try:
            for temperatures in [(one,) for one in every] if self.settings.keep_state else [every]:
                self._measure_at(temperatures, groups, results)
        except KeyboardInterrupt:
            self.is_interrupted = True
            if not results:
                raise
        return results

    def num_groups(self, prompts: Sequence[BenchPrompt]) -> int:
        """Return how many times `measure` decodes a group in total, including the warm-up."""
        repetitions = 1 + self.settings.repeats * len(group_prompts(prompts, self.settings))
        return repetitions * len(self.methods) * len(self.settings.temperatures)

    def decode(
        self,
        method: Method,
        group: Sequence[BenchPrompt],
        sampling: SamplingOptions,
        seed: int,
        repeat: int = 0,
        number: int = 0,
    ) -> list[Sample]:
        """Return the samples of a group of prompts.

        Args:
            seed: seed of the first chat turn; the seed increases by 1 with each later chat turn.
            number: number of the group.
        """
        turns: list[list[Continuation]] = [[] for _ in group]
        seconds: list[Counter[str]] = [Counter() for _ in group]
        for turn in range(max(prompt.num_turns for prompt in group)):
            live = [index for index, prompt in enumerate(group) if prompt.num_turns > turn]
            ids = [self._encode(group[index], turns[index]) for index in live]
            started = now()
            decoded = method.decode(ids, sampling, seed + turn)
            taken = {**decoded.parts, "seconds": now() - started}
            for index, continuation in zip(live, decoded.continuations, strict=True):
                turns[index].append(continuation)
                seconds[index].update({name: value / len(live) for name, value in taken.items()})
        answers = zip(group, turns, seconds, strict=True)
        return [Sample.of(*answer, repeat, number) for answer in answers]

    def sampling(self, temperature: float) -> SamplingOptions:
        """Return the sampling options at a temperature."""
        settings = self.settings
        return SamplingOptions(temperature, settings.max_new_tokens, settings.top_p, settings.top_k)

    def _measure_at(
        self, temperatures: Sequence[float], groups: list[list[BenchPrompt]], results: Results
    ) -> None:
        """Add the measurements of each group once all methods have decoded it."""
        for temperature in temperatures:
            self._warm_up(groups, self.sampling(temperature))
        order, seed = random.Random(self.settings.seed), self.settings.seed
        for repeat in range(self.settings.repeats):
            for number in order.sample(range(len(groups)), len(groups)):
                of_group: Results = {}
                # All methods get the same seed, so methods that sample in the same way generate the
                # same text.
                own = seed + 1000 * (repeat * len(groups) + number)
                for temperature in order.sample(temperatures, len(temperatures)):
                    for method in order.sample(self.methods, len(self.methods)):
                        if not self.settings.keep_state:
                            method.reset()
                        sampling = self.sampling(temperature)
                        of_group[method.name, temperature] = self.decode(
                            method, groups[number], sampling, own, repeat, number
                        )
                        self.advance()
                for key, measured in of_group.items():
                    results.setdefault(key, []).extend(measured)

    def _warm_up(self, groups: list[list[BenchPrompt]], sampling: SamplingOptions) -> None:
        """Decode a group of each size: a decoder may measure costs for each size."""
        of_size = {len(group): group for group in reversed(groups)}
        for method in self.methods:
            for group in of_size.values():
                self.decode(method, group, sampling, self.settings.seed)
            method.reset()
            self.advance()

    def _encode(self, prompt: BenchPrompt, turns: Sequence[Continuation]) -> list[int]:
        """Return the prompt of the next chat turn."""
        answers = [self.texts.decode(turn.token_ids) for turn in turns]
        return self.texts.encode(prompt.chat_turn(answers))


def group_prompts(
    prompts: Sequence[BenchPrompt], settings: ComparisonSettings
) -> list[list[BenchPrompt]]:
    """Return shuffled groups of prompts to decode together, each from a single category."""
    by_category: dict[str, list[BenchPrompt]] = {}
    shuffled = random.Random(settings.seed).sample(prompts, len(prompts))
    for prompt in shuffled:
        by_category.setdefault(prompt.category, []).append(prompt)
    size = settings.batch_size
    return [
        members[begin : begin + size]
        for members in by_category.values()
        for begin in range(0, len(members), size)
    ]
