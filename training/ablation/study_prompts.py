"""The prompts of a study: those it reports on, and those that may choose settings."""

import json
from collections.abc import Sequence
from pathlib import Path

from inference.comparison.prompt_file import BenchPrompt, distinct, prompt_of, read_bench_prompts
from inference.prompts import encode_prompt
from jakiro.errors import ConfigError
from jakiro.files import write_atomically
from training.ablation.study_settings import FEWEST_PROMPTS
from training.preparation import Prepared


class StudyPrompts:
    """Prompts that are checked before any work.

    Args:
        inputs: of the study; its prompts are starts of held-out rows of data.
        test: a prompt file to report on; None for the inputs' prompts.
        dev: a prompt file to choose settings on, if any are chosen.
        reserved: test prompts that are not reported on, for trees are chosen on them.

    Raises:
        PromptError: a file cannot be used.
        ConfigError: there are too few prompts, or a dev prompt is also a test prompt.
    """

    def __init__(
        self, inputs: Prepared, test: Path | None, dev: Path | None, reserved: int = 0
    ) -> None:
        self._inputs = inputs
        self._test = test
        found = self._test_prompts()
        if len(found) < FEWEST_PROMPTS + reserved:
            raise ConfigError(
                "there are too few prompts to measure on",
                expected=f"at least {FEWEST_PROMPTS + reserved} different ones",
                got=len(found),
                remedy="give --prompts FILE, or hold documents out with --set data.held_out=N",
            )
        if dev is not None:
            self._require_apart(distinct(read_bench_prompts(dev)), found, dev)

    def test_file(self, folder: Path) -> Path:
        """Return the file to report on; starts of held-out rows of data are written down first."""
        if self._test is not None:
            return self._test
        path = folder / "prompts.jsonl"
        rows = [json.dumps({"prompt": prompt}) + "\n" for prompt in self._inputs.prompts]
        write_atomically(path, "".join(rows))
        return path

    def _test_prompts(self) -> list[BenchPrompt]:
        if self._test is not None:
            return distinct(read_bench_prompts(self._test))
        return distinct(map(prompt_of, self._inputs.prompts))

    def _require_apart(
        self, dev: Sequence[BenchPrompt], test: Sequence[BenchPrompt], path: Path
    ) -> None:
        reported = {self._tokens(one) for one in test}
        shared = sum(self._tokens(one) in reported for one in dev)
        if shared:
            raise ConfigError(
                f"{path} shares prompts with those that results are reported on",
                expected="dev prompts that are no test prompts",
                got=f"{shared} of {len(dev)} in both",
                remedy="take them out of one of the two files",
            )

    def _tokens(self, prompt: BenchPrompt) -> tuple[int, ...]:
        """Return the first turn as the target reads it, however it was written."""
        vocab_size = self._inputs.target.spec.vocab_size
        return tuple(encode_prompt(prompt.first, self._inputs.tokenizer, vocab_size))
