"""Exceptions of Jakiro; messages name the expected value, the value found, and the remedy."""

EXIT_CODE_BAD_INPUT = 2
EXIT_CODE_INTERRUPTED = 130


class JakiroError(Exception):
    """Base class of all errors that are raised deliberately.

    Args:
        message: description of the problem, one sentence without a final period.
    """

    def __init__(
        self,
        message: str,
        *,
        expected: object = None,
        got: object = None,
        remedy: str | None = None,
    ) -> None:
        parts = [message]
        if expected is not None:
            parts.append(f"expected: {expected}")
        if got is not None:
            parts.append(f"got: {got}")
        if remedy is not None:
            parts.append(f"remedy: {remedy}")
        super().__init__("; ".join(parts))


class ConfigError(JakiroError, ValueError):
    """A configuration value, key, or combination that cannot be used."""


class PromptError(JakiroError, ValueError):
    """A prompt or a sampling argument that cannot be used."""


class DataError(JakiroError, ValueError):
    """Training data is missing, malformed, or unusable."""


class CheckpointError(JakiroError):
    """A checkpoint or cached artifact is missing, damaged, or incompatible."""


class ResourceError(JakiroError):
    """Memory, disk space, or another resource of the machine is insufficient."""


class TargetNotSupported(JakiroError):
    """The target model has a part that exact tree verification cannot handle."""


class TargetMismatch(JakiroError, ValueError):
    """A drafter, tokenizer, or template was made for a target other than the one in use."""


class NumericalError(JakiroError, ArithmeticError):
    """Logits, a loss or a gradient are not finite, or logits processing excludes every token."""


class RequestError(JakiroError, RuntimeError):
    """A logits processor or a stopping criterion of a request raised an exception, the cause."""

    @classmethod
    def caused_by(cls, part: str, error: Exception) -> "RequestError":
        return cls(
            f"{part} of the request raised an exception",
            expected="a result for every sequence of tokens",
            got=f"{type(error).__name__}: {error}",
            remedy=f"correct or remove {part}",
        )


class EngineStopped(JakiroError, RuntimeError):
    """The thread that decodes was closed, or has died."""


class DraftError(JakiroError, ValueError):
    """A drafter proposed a draft tree that cannot be verified."""
