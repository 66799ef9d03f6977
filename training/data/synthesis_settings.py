"""Settings of the synthesis of training data, which are read and checked without torch."""

from typing import Literal

from pydantic import Field

from jakiro.utils.settings import Settings

KEY_TOKENS = 8  # number of leading tokens in which a record must differ from every other record


class SynthesisSettings(Settings):
    """Settings of the synthesis.

    Attributes:
        conversations: number of records in the finished file, including those of earlier runs.
        kind: kind of records: "chats", which need a chat template, or "texts".
        multi_turn: share of the conversations that are to have two to `max_turns` questions.
        max_turns: largest number of questions in a conversation.
        greedy: share of the conversations with greedy answers; the others are sampled.
        temperature: sampling temperature of questions, texts and sampled answers.
        top_p: total probability of the tokens from which each token is sampled (nucleus sampling);
            the other sampling options are those of the target's generation config.
        max_question_tokens: largest number of tokens in a question; longer questions are dropped.
        max_new_tokens: largest number of tokens in an answer or a text.
        seed: random seed; the random numbers for a record depend only on this seed and on the
            number of the record.
        batch_size: number of records generated together, which affects only speed and memory use.
    """

    conversations: int = Field(ge=1)
    kind: Literal["chats", "texts"] = "chats"
    multi_turn: float = Field(0.3, ge=0, le=1)
    max_turns: int = Field(3, ge=1)
    greedy: float = Field(0.5, ge=0, le=1)
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(0.99, gt=0, le=1)
    max_question_tokens: int = Field(256, ge=KEY_TOKENS)
    max_new_tokens: int = Field(512, ge=1)
    seed: int = Field(0, ge=0)
    batch_size: int = Field(16, ge=1)
