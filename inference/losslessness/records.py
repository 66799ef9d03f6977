"""What a verification is asked to do, and what it found."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, computed_field

from jakiro.utils.settings import Settings

FALSE_ALARM = 0.001  # chance that a correct decoder fails one of the tests of its law
DISTRIBUTION_TESTS = 2  # of each prompt


class VerifySettings(Settings):
    """How much to generate and how to sample; what is None is the target's own default."""

    max_new_tokens: int = Field(64, ge=1)  # of each greedy continuation
    num_prompts: int | None = Field(None, ge=1)  # use the first ones only
    samples: int = Field(2000, ge=50)  # continuations drawn from each sampled prompt
    sampled_prompts: int = Field(1, ge=0)  # how many prompts, the first ones, are sampled from
    sample_length: int | None = Field(None, ge=2)  # None: the draft tree's depth and two more
    temperature: float = Field(1.0, gt=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)  # 0: all tokens
    seed: int = Field(0, ge=0)

    @property
    def sampling(self) -> dict[str, Any]:
        """The arguments of `generate` that shape the law."""
        shaping = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return {name: value for name, value in shaping.items() if value is not None}


class _Record(BaseModel):
    """Base of what was found; its text is one line of figures, `details` are further lines."""

    model_config = ConfigDict(frozen=True)

    @property
    def details(self) -> tuple[str, ...]:
        """What the figures count, one by one."""
        return ()


class Difference(_Record):
    """The first place at which a greedy continuation is not the target's own."""

    prompt: int  # counted from 1
    position: int  # among the new tokens, counted from 1
    target_token: int | None  # None: the target's continuation had ended
    decoder_token: int | None
    gap: float | None  # between the target's logits of the two tokens
    rounding: float  # what the dtype can move them by; 0 in single precision

    @computed_field  # type: ignore[prop-decorator]
    @property
    def is_near_tie(self) -> bool:
        """Whether rounding alone explains the difference."""
        return self.gap is not None and self.gap <= self.rounding

    def __str__(self) -> str:
        kind = "near-tie" if self.is_near_tie else "difference"
        gap = "none" if self.gap is None else f"{self.gap:.3g}"
        return (
            f"{kind}: prompt {self.prompt}, new token {self.position}: target "
            f"{self.target_token}, decoder {self.decoder_token}, logit gap {gap} "
            f"(rounding {self.rounding:.3g})"
        )


class GreedyCheck(_Record):
    """Greedy continuations beside the target's own."""

    name: Literal["greedy equality"] = "greedy equality"
    prompts: int
    tokens: int  # compared, up to each first difference
    drafted: int  # of all tokens of the decoder, those won by a draft
    differences: tuple[Difference, ...] = ()

    @computed_field  # type: ignore[prop-decorator]
    @property
    def passed(self) -> bool:
        """Whether every difference is a near-tie."""
        return all(one.is_near_tie for one in self.differences)

    @property
    def details(self) -> tuple[str, ...]:
        """Each difference."""
        return tuple(map(str, self.differences))

    def __str__(self) -> str:
        near = sum(one.is_near_tie for one in self.differences)
        return (
            f"{self.prompts} prompts, {self.tokens} tokens equal, {self.drafted} drafted; "
            f"{len(self.differences) - near} differences, {near} near-ties"
        )


class DistributionCheck(_Record):
    """A chi-square test of sampled continuations against the target's exact law."""

    name: Literal["sequence law", "token ranks"]
    prompt: int
    counted: int  # sequences, or tokens after the first ones
    drafted: int  # tokens won by a draft, in all sequences
    cells: int
    statistic: float
    p_value: float
    threshold: float  # of the p-value

    @computed_field  # type: ignore[prop-decorator]
    @property
    def passed(self) -> bool:
        """Whether the counts are what chance makes of the target's law."""
        return self.p_value >= self.threshold

    def __str__(self) -> str:
        what = "sequences" if self.name == "sequence law" else "tokens"
        return (
            f"prompt {self.prompt}: {self.counted} {what}, {self.drafted} tokens drafted; "
            f"chi-square {self.statistic:.1f} in {self.cells} cells, "
            f"p = {self.p_value:.3g} (at least {self.threshold:.2g})"
        )


class SupportCheck(_Record):
    """Whether a token occurred that the target's processed law excludes."""

    name: Literal["impossible tokens"] = "impossible tokens"
    prompt: int
    tokens: int
    impossible: int
    at_the_cut: int  # excluded by less than the dtype's rounding

    @computed_field  # type: ignore[prop-decorator]
    @property
    def passed(self) -> bool:
        """Whether none did."""
        return self.impossible == 0

    def __str__(self) -> str:
        return (
            f"prompt {self.prompt}: {self.impossible} of {self.tokens} tokens, "
            f"{self.at_the_cut} more within rounding of the cut"
        )


Check = GreedyCheck | DistributionCheck | SupportCheck


class VerifyReport(_Record):
    """All checks, and what was checked."""

    target: str
    dtype: str
    settings: VerifySettings
    checks: tuple[Check, ...]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)

    @property
    def summary(self) -> str:
        """How many checks passed, and what a failure may come from."""
        passed = sum(check.passed for check in self.checks)
        counted = f"{passed} of {len(self.checks)} checks passed"
        if self.passed or self.dtype in ("float32", "float64"):
            return counted
        return f"{counted}; rounding of {self.dtype} moves laws: float32 tells it from a fault"
