"""The fractions of a learning curve, as the command line gives them."""

from jakiro.errors import ConfigError


def parse_fractions(text: str) -> list[float]:
    """Return the fractions in a comma-separated list, in ascending order and without repetitions.

    Raises:
        ConfigError: the text is not a list of two or more different numbers above 0 and up to 1.
    """
    try:
        fractions = sorted({float(part) for part in text.split(",")})
    except ValueError:
        fractions = []
    if len(fractions) < 2 or not 0 < fractions[0] <= fractions[-1] <= 1:
        raise ConfigError(
            "--learning-curve needs fractions of the documents",
            expected="two or more different numbers above 0 and up to 1, such as 0.25,0.5,1",
            got=text,
            remedy="write several fractions, separated by commas",
        )
    return fractions
