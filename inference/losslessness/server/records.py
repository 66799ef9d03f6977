"""Settings and results of the verification of a server."""

from typing import Literal

from pydantic import Field, computed_field

from inference.losslessness.records import (
    DistributionCheck,
    FirstDifference,
    Result,
    SupportCheck,
    VerifySettings,
    drafted_note,
)
from jakiro.utils.wording import counted

_SAMPLE_LENGTH = 6  # number of tokens of a sampled text; longer texts rarely have a cell
_SHOWN = 40  # characters of each text


class ServerVerifySettings(VerifySettings):
    """Settings of the verification of a server."""

    model: str | None = None  # name of the model; None for the only one that the server has
    chat: bool = False  # whether a text is sent as the message of a user
    concurrency: int = Field(8, ge=1)  # number of requests at the same time
    # not stored, because the server's drafter is not loaded here
    other_weights: bool = Field(False, exclude=True)

    @property
    def length(self) -> int:
        """The number of tokens of a sampled text that does not end early."""
        return self.sample_length or _SAMPLE_LENGTH


class TextDifference(FirstDifference):
    """The first token at which a server's greedy text differs from the target's own."""

    # likeliest token that agrees with the server's text; None if there is no such token
    server_token: int | None
    target_text: str  # the beginning of the rest of each text
    server_text: str

    def __str__(self) -> str:
        texts = self.target_text[:_SHOWN], self.server_text[:_SHOWN]
        return self.described(f"target {texts[0]!r}, server {texts[1]!r}")


class GreedyTextCheck(Result):
    """Comparison of a server's greedy texts with the target's own."""

    name: Literal["greedy texts"] = "greedy texts"
    prompts: int
    tokens: int  # number of equal tokens before the first differences, over all prompts
    drafted: (
        int | None
    )  # number of accepted drafts in all texts; None if the server does not report it
    differences: tuple[TextDifference, ...] = ()

    @computed_field  # type: ignore[prop-decorator]
    @property
    def passed(self) -> bool:
        """Whether all differences are near-ties."""
        return all(difference.is_near_tie for difference in self.differences)

    @property
    def details(self) -> tuple[str, ...]:
        """A line for each difference."""
        return tuple(map(str, self.differences))

    def __str__(self) -> str:
        near = sum(difference.is_near_tie for difference in self.differences)
        return (
            f"{counted(self.prompts, 'prompt')}, {self.tokens} tokens equal, "
            f"{drafted_note(self.drafted)}; "
            f"{counted(len(self.differences) - near, 'difference')}, {counted(near, 'near-tie')}"
        )


class SeedCheck(Result):
    """Comparison of texts with the same seed."""

    name: Literal["seeds"] = "seeds"
    texts: int
    same: int
    drafted: int | None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def passed(self) -> bool:
        """Whether the same seed always gave the same text."""
        return self.same == self.texts

    def __str__(self) -> str:
        return f"{self.same} of {self.texts} texts are the same if they are requested again"


ServerCheck = GreedyTextCheck | SeedCheck | DistributionCheck | SupportCheck


class ServerReport(Result):
    """The results of all checks of a server."""

    url: str
    model: str
    system_fingerprints: tuple[str, ...]  # without repetitions, from the server's answers
    target: str
    dtype: str  # dtype of the target in this process; the server's own is not known
    settings: ServerVerifySettings
    checks: tuple[ServerCheck, ...]
    # sentences about what cannot be checked through the server's interface, or what looks wrong
    notes: tuple[str, ...]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)

    @property
    def remarks(self) -> tuple[str, ...]:
        """The notes, and a remark on checks in which no draft was accepted."""
        undrafted = [check.name for check in self.checks if check.drafted == 0]
        if not undrafted:
            return self.notes
        names = ", ".join(dict.fromkeys(undrafted))
        return (
            *self.notes,
            f"no draft was accepted in: {names}. These checks say little about decoding with "
            "drafts; use prompts that suit the server's drafter",
        )

    @property
    def summary(self) -> str:
        """The number of passed checks, and a hint if rounding may explain a failure."""
        passed = sum(check.passed for check in self.checks)
        text = f"{passed} of {len(self.checks)} checks passed"
        if self.passed:
            return text
        return (
            f"{text}; if the server computes in half precision, rounding may be the cause: serve "
            "the target in float32, and verify again with --dtype float32"
        )
