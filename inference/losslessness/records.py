"""Settings and results of a verification."""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, computed_field

from jakiro.utils.settings import Settings
from jakiro.utils.wording import counted

FALSE_ALARM = 0.001  # probability that a correct decoder fails one or more distribution tests
DISTRIBUTION_TESTS = 2  # number of distribution tests for each prompt
FEWEST_SAMPLES = 50
QUICK_SAMPLES = 200  # number of samples with `jakiro verify --quick`


class VerifySettings(Settings):
    """What is verified."""

    max_new_tokens: int = Field(64, ge=1)
    """Largest number of tokens of a greedy continuation."""
    num_prompts: int | None = Field(None, ge=1)
    """Largest number of prompts; by default all prompts in the file."""
    samples: int = Field(2000, ge=FEWEST_SAMPLES)
    """Number of continuations to sample for each prompt of --sampled-prompts, at least 50."""
    sampled_prompts: int = Field(1, ge=0)
    """Number of prompts, counted from the first, for which continuations are sampled."""
    sample_length: int | None = Field(None, ge=2)
    """Number of tokens of a sampled continuation; by default the draft tree's depth plus 2."""
    temperature: float = Field(1.0, gt=0)
    """Temperature of the samples."""
    top_p: float | None = Field(None, gt=0, le=1)
    """As in generate(); by default the value of the target's generation config."""
    top_k: int | None = Field(None, ge=0)
    """As in generate(); by default the value of the target's generation config."""
    seed: int = Field(0, ge=0)
    """The same seed gives the same samples."""
    other_weights: bool = False
    """Use a trained drafter even if it was trained for other weights of the target."""

    @property
    def sampling(self) -> dict[str, Any]:
        """The arguments of `generate` that process the distribution."""
        options = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return {name: value for name, value in options.items() if value is not None}


def counted_differences(differences: Sequence["FirstDifference"]) -> str:
    """Return the numbers of differences and near-ties in words."""
    near = sum(difference.is_near_tie for difference in differences)
    return f"{counted(len(differences) - near, 'difference')}, {counted(near, 'near-tie')}"


def drafted_note(drafted: int | None) -> str:
    """Return how many tokens are accepted drafts, in words; None if it is not known."""
    return "an unknown number drafted" if drafted is None else f"{drafted} tokens drafted"


class Result(BaseModel):
    """Base class of results: `str()` returns a line of figures, `details` returns further lines."""

    model_config = ConfigDict(frozen=True)

    @property
    def details(self) -> tuple[str, ...]:
        """The lines that list the counted items one by one."""
        return ()


class FirstDifference(Result):
    """The first token at which a text differs from the target's own greedy continuation."""

    prompt: int  # counted from 1
    position: int  # position among the new tokens, counted from 1
    target_token: int | None  # None if the target's continuation has already ended
    # difference between the target's logits of the two tokens; None if there is only one token
    gap: float | None
    rounding: float  # largest effect of rounding on these logits; 0 in single precision

    @computed_field  # type: ignore[prop-decorator]
    @property
    def is_near_tie(self) -> bool:
        """Whether rounding alone can explain the difference."""
        return self.gap is not None and self.gap <= self.rounding

    def described(self, tokens: str) -> str:
        """Return a line about the difference of two tokens or texts."""
        kind = "near-tie" if self.is_near_tie else "difference"
        gap = "none" if self.gap is None else f"{self.gap:.3g}"
        return (
            f"{kind}: prompt {self.prompt}, new token {self.position}: {tokens}, logit gap {gap} "
            f"(rounding {self.rounding:.3g})"
        )


class GreedyDifference(FirstDifference):
    """The first token at which a greedy continuation differs from the target's own."""

    decoder_token: int | None  # None if the decoder's continuation has already ended

    def __str__(self) -> str:
        return self.described(f"target {self.target_token}, decoder {self.decoder_token}")


class GreedyCheck(Result):
    """Comparison of greedy continuations with the target's own."""

    name: Literal["greedy equality"] = "greedy equality"
    prompts: int
    tokens: int  # number of equal tokens before the first differences, over all prompts
    drafted: int  # number of the decoder's tokens that are accepted drafts
    same_without_drafts: int  # number of texts that the decoder also generates without drafts
    # whether the target is batch-invariant, so that drafts must not change any text, even at
    # near-ties
    batch_invariant: bool = False
    differences: tuple[GreedyDifference, ...] = ()

    @computed_field  # type: ignore[prop-decorator]
    @property
    def same_as_target(self) -> int:
        """The number of texts that `generate()` of transformers also generates."""
        return self.prompts - len(self.differences)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def passed(self) -> bool:
        """Whether all differences are near-ties, and there are none that rounding rules out."""
        if self.batch_invariant and self.same_without_drafts < self.prompts:
            return False
        return all(difference.is_near_tie for difference in self.differences)

    @property
    def details(self) -> tuple[str, ...]:
        """A line for each difference."""
        return tuple(map(str, self.differences))

    def __str__(self) -> str:
        return (
            f"{counted(self.prompts, 'prompt')}, {self.tokens} tokens equal, "
            f"{self.drafted} drafted; {counted_differences(self.differences)}; "
            f"texts equal to those of generate(): {self.same_as_target}, "
            f"to those without drafts: {self.same_without_drafts}"
        )


class DistributionCheck(Result):
    """A chi-square test of sampled continuations against the target's exact distribution."""

    name: Literal["sequence distribution", "token ranks"]
    prompt: int
    counted: int  # number of sequences, or of tokens after the first of each sequence
    # number of accepted drafts in all sequences; None if it is not known
    drafted: int | None
    cells: int
    statistic: float
    p_value: float
    threshold: float  # smallest p-value that passes

    @computed_field  # type: ignore[prop-decorator]
    @property
    def passed(self) -> bool:
        """Whether the counts agree with the target's distribution."""
        return self.p_value >= self.threshold

    def __str__(self) -> str:
        unit = "sequences" if self.name == "sequence distribution" else "tokens"
        return (
            f"prompt {self.prompt}: {self.counted} {unit}, {drafted_note(self.drafted)}; "
            f"chi-square {self.statistic:.1f} in {self.cells} cells, "
            f"p = {self.p_value:.3g} (must be at least {self.threshold:.2g})"
        )


class SupportCheck(Result):
    """A count of tokens with probability zero in the target's processed distribution."""

    name: Literal["impossible tokens"] = "impossible tokens"
    prompt: int
    tokens: int
    # number of accepted drafts among the tokens; None if it is not known
    drafted: int | None
    impossible: int
    at_the_cut: int  # number of tokens that may be excluded only because of rounding

    @computed_field  # type: ignore[prop-decorator]
    @property
    def passed(self) -> bool:
        """Whether no impossible token occurred."""
        return self.impossible == 0

    def __str__(self) -> str:
        return (
            f"prompt {self.prompt}: {self.impossible} of {self.tokens} tokens, "
            f"{self.at_the_cut} more may be excluded only because of rounding"
        )


Check = GreedyCheck | DistributionCheck | SupportCheck


class Report(Result):
    """The results of all checks, with the target."""

    target: str
    dtype: str
    checks: tuple[Any, ...]
    notes: tuple[str, ...] = ()

    @computed_field  # type: ignore[prop-decorator]
    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)

    @property
    def remarks(self) -> tuple[str, ...]:
        """The notes, and a remark on checks that say little, because no draft was accepted."""
        undrafted = [check.name for check in self.checks if check.drafted == 0]
        if not undrafted:
            return self.notes
        return (
            *self.notes,
            f"no draft was accepted in: {', '.join(dict.fromkeys(undrafted))}. These checks say "
            "little about decoding with drafts; use prompts that suit the drafter, or trees of a "
            "fixed size",
        )

    @property
    def summary(self) -> str:
        """The number of passed checks, and a hint if rounding may explain a failure."""
        passed = sum(check.passed for check in self.checks)
        text = f"{passed} of {len(self.checks)} checks passed"
        return text if self.passed else text + self._hint

    @property
    def _hint(self) -> str:
        if self.dtype in ("float32", "float64"):
            return ""
        return f"; rounding in {self.dtype} may be the cause: verify again in float32"


class VerifyReport(Report):
    """The results of all checks of a decoder; `gguf_sha256` is that of the target's GGUF file."""

    gguf_sha256: str | None = None
    settings: VerifySettings
    checks: tuple[Check, ...]
