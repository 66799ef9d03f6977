"""The demo's tokenizer: byte-level BPE whose pieces follow the layout of Python source."""

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Int
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"

# What merges may not cross. A line break takes the indentation that follows it along, so that the
# layout of a line is one token; a word takes one blank before it; digits come in threes at most.
_PIECES = r" ?\p{L}+|\p{N}{1,3}|_+| ?[^\s\p{L}\p{N}_]+|\n+[ \t]*|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE vocabulary, in which `END_OF_TEXT` has the id 0 and also pads.

    Any text survives encoding and decoding unchanged. The same texts give the same tokenizer.

    Args:
        texts: what to learn the merges from.
        vocab_size: number of tokens; more than 256, as every byte has one.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def encode_documents(
    tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]
) -> Int[Tensor, " tokens"]:
    """Encode texts one after another, each followed by the end-of-text token."""
    end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    encoded = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return torch.tensor([token for ids in encoded for token in [*ids, end]], dtype=torch.int64)
