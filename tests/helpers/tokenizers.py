"""Tiny tokenizers, created when needed, that can encode any text."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

TEXT = "def main(argument):\n    return argument + 1\n\nprint(main(41), 'naïve', '→ ü 漢字')\n"


class SlowTokenizer(PreTrainedTokenizer):
    """A tokenizer in Python, without offsets, whose tokens are characters."""

    def __init__(self, chat_template: str | None = None) -> None:
        self._tokens: list[str] = ["</s>"]
        super().__init__(eos_token="</s>", chat_template=chat_template)

    @property
    def vocab_size(self) -> int:
        """The number of different tokens encountered so far."""
        return len(self._tokens)

    def get_vocab(self) -> dict[str, int]:
        """Return the ids of the tokens encountered so far, by token."""
        return {token: number for number, token in enumerate(self._tokens)}

    def _tokenize(self, text: str, **_: object) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        if token not in self._tokens:
            self._tokens.append(token)
        return self._tokens.index(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self._tokens[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Return the text of a list of tokens."""
        return "".join(tokens)


def tiny_tokenizer(
    chat_template: str | None = None, texts: Iterable[str] = (TEXT,) * 4
) -> PreTrainedTokenizerFast:
    """Return a tokenizer with byte-level BPE and 300 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["</s>", "<user>", "<assistant>", "<system>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    wrapped.chat_template = chat_template
    return wrapped


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with five tokens, one of which is two others."""
    names = ["a", "b", "ab", "c", "</s>"]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def spaced_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens contain the space before a word, as those of SentencePiece.

    A space at the beginning of a text is left out when tokens are decoded.
    """
    names = [
        "<unk>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "▁a",
        "b",
        "▁b",
    ]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    words = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*words, decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")
