"""Settings of the regeneration, which are read and checked without torch."""

from pydantic import Field

from jakiro.utils.settings import Settings


class RegenerationSettings(Settings):
    """Answers."""

    temperature: float = Field(0.0, ge=0)
    """Sampling temperature, 0 for greedy decoding; the other sampling options are those of the
    target's generation config."""
    max_new_tokens: int = Field(512, ge=1)
    """Largest number of tokens in an answer."""
    prompt_tokens: int = Field(64, ge=1)
    """Largest number of tokens at the start of a plain text to use as its prompt."""
    seed: int = Field(0, ge=0)
    """The same seed gives the same answers: they depend only on the seed, the record and the
    chat turn."""
    batch_size: int = Field(8, ge=1)
    """Number of records answered together, which affects only speed and memory use."""
    skip_bad_records: bool = False
    """Leave out unusable records and report how many; by default, they are errors."""
