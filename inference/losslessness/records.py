"""Settings and results of a verification."""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, computed_field

from jakiro.utils.settings import Settings
from jakiro.utils.wording import counted

FALSE_ALARM = 0.001  # probability that a correct decoder fails one or more distribution tests
DISTRIBUTION_TESTS = 2  # number of distribution tests for each prompt
FEWEST_SAMPLES = 50
FEWEST_DRAFTS = 20  # accepted drafts below which a check says little


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
    def threshold(self) -> float:
        """The smallest p-value that passes."""
        return FALSE_ALARM / (DISTRIBUTION_TESTS * max(self.sampled_prompts, 1))

    @property
    def sampling(self) -> dict[str, Any]:
        """The arguments of `generate` that process the distribution."""
        options = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return {name: value for name, value in options.items() if value is not None}


class Difference(BaseModel):
    """The first token at which a text differs from the target's own greedy continuation.

    A token is None if the text has already ended, or if the server's token is not known. The texts
    are the beginnings of what follows, if a server returned only text.
    """

    model_config = ConfigDict(frozen=True)

    prompt: int  # counted from 1
    position: int  # position among the new tokens, counted from 1
    target_token: int | None
    decoder_token: int | None
    # difference between the target's logits of the two tokens; None if there is only one token
    gap: float | None
    rounding: float  # largest effect of rounding on these logits; 0 in single precision
    target_text: str | None = None
    server_text: str | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def is_near_tie(self) -> bool:
        """Whether rounding alone can explain the difference."""
        return self.gap is not None and self.gap <= self.rounding

    def __str__(self) -> str:
        kind = "near-tie" if self.is_near_tie else "difference"
        gap = "none" if self.gap is None else f"{self.gap:.3g}"
        tokens = f"target {self.target_token}, decoder {self.decoder_token}"
        if self.target_text is not None:
            tokens = f"target {self.target_text!r}, server {self.server_text!r}"
        return (
            f"{kind}: prompt {self.prompt}, new token {self.position}: {tokens}, logit gap {gap} "
            f"(rounding {self.rounding:.3g})"
        )


def count_differences(differences: Sequence[Difference]) -> str:
    """Return the numbers of differences and near-ties in words."""
    near = sum(difference.is_near_tie for difference in differences)
    return f"{counted(len(differences) - near, 'difference')}, {counted(near, 'near-tie')}"


class Check(BaseModel):
    """The result of a check: its verdict, and further fields with the figures that it is based on.

    `drafted` is the number of accepted drafts among the checked tokens; None if it is not known.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str
    passed: bool
    drafted: int | None = None
    differences: tuple[Difference, ...] = ()
    line: str = Field(exclude=True)  # the figures in words

    def __str__(self) -> str:
        return self.line


class Report(BaseModel):
    """The results of all checks of a decoder, or of the server at `url`.

    `dtype` is that of the target in this process.
    """

    model_config = ConfigDict(frozen=True)

    target: str
    dtype: str
    url: str | None = None
    settings: VerifySettings
    checks: tuple[Check, ...]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)

    @property
    def remark(self) -> str | None:
        """A remark on checks that say little, because few drafts were accepted."""
        weak = [
            f"{check.name} ({'unknown' if check.drafted is None else check.drafted})"
            for check in self.checks
            if (check.drafted or 0) < FEWEST_DRAFTS
        ]
        if not weak:
            return None
        return (
            f"few drafts were accepted in: {', '.join(dict.fromkeys(weak))}. These checks say "
            "little about decoding with drafts; use prompts that suit the drafter, more samples, "
            "and more tokens"
        )

    @property
    def summary(self) -> str:
        """The number of passed checks, and a hint if rounding may explain a failure."""
        text = f"{sum(check.passed for check in self.checks)} of {len(self.checks)} checks passed"
        if self.passed or (self.url is None and self.dtype in ("float32", "float64")):
            return text
        where = "" if self.url is None else ", also on the server"
        return f"{text}; rounding may be the cause: verify again in float32{where}"
