"""Tiny byte-level tokenizers, trained on the spot; any text can be encoded."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXT = "def main(argument):\n    return argument + 1\n\nprint(main(41), 'naïve', '→ ü 漢字')\n"


def tiny_tokenizer(
    chat_template: str | None = None, texts: Iterable[str] = (TEXT,) * 4
) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 300 tokens."""
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
