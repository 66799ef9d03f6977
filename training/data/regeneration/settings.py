"""Settings of the regeneration, which are read and checked without torch."""

from pydantic import Field

from jakiro.utils.settings import Settings


class RegenerationSettings(Settings):
    """Settings of the regeneration.

    Attributes:
        temperature: sampling temperature, 0 for greedy decoding; the other sampling options are
            those of the target's generation config.
        max_new_tokens: largest number of tokens in an answer.
        prompt_tokens: largest number of tokens of a text that are kept as its prompt.
        seed: random seed; the random numbers for an answer depend only on this seed, the record and
            the chat turn.
        batch_size: number of records answered together, which affects only speed and memory use.
        skip_bad_records: whether unusable records are skipped; by default, the first unusable
            record raises an error.
    """

    temperature: float = Field(0.0, ge=0)
    max_new_tokens: int = Field(512, ge=1)
    prompt_tokens: int = Field(64, ge=1)
    seed: int = Field(0, ge=0)
    batch_size: int = Field(8, ge=1)
    skip_bad_records: bool = False
