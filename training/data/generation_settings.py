"""Settings of the records that the target writes, which are read and checked without torch."""

from typing import Literal

from pydantic import Field

from jakiro.utils.settings import Settings

KEY_TOKENS = 8  # number of leading tokens in which a record must differ from every other record


class SynthesisSettings(Settings):
    """What is written."""

    conversations: int = Field(ge=1)
    """Number of records in the finished file, including those of earlier runs."""
    kind: Literal["chats", "texts"] = "chats"
    """chats: conversations of a chat model; texts: plain texts of a base model."""
    multi_turn: float = Field(0.3, ge=0, le=1)
    """Share of the conversations with more than one question."""
    max_turns: int = Field(3, ge=1)
    """Largest number of questions in a conversation."""
    greedy: float = Field(0.5, ge=0, le=1)
    """Share of the conversations with greedy answers; the others are sampled."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature of questions, texts and sampled answers."""
    top_p: float = Field(0.99, gt=0, le=1)
    """Sample from the most likely tokens with this total probability (top-p); the other sampling
    options are those of the target's generation config."""
    max_question_tokens: int = Field(256, ge=KEY_TOKENS)
    """Largest number of tokens in a question; longer questions are dropped."""
    max_new_tokens: int = Field(512, ge=1)
    """Largest number of tokens in an answer or a text."""
    seed: int = Field(0, ge=0)
    """The same seed gives the same records: the random numbers for a record depend only on the seed
    and on the number of the record."""
    batch_size: int = Field(16, ge=1)
    """Number of records generated together, which affects only speed and memory use."""


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
