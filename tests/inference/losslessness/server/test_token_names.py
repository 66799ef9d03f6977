"""Tokens that have the same name form groups, whose probabilities are added."""

import pytest
import torch
from helpers.models import tiny_llama
from helpers.tokenizers import tiny_tokenizer

from inference.generation.streaming import REPLACEMENT
from inference.losslessness.reference import Reference
from inference.losslessness.server.token_names import NamedReference, TokenNames


def test_parts_of_characters_share_a_name_and_letters_do_not() -> None:
    tokenizer = tiny_tokenizer()
    names = TokenNames(tokenizer, 310, {0}, special=True)
    letter = tokenizer.convert_tokens_to_ids("a")
    assert names.token_of("a") == letter
    assert letter not in names.shared
    part = names.token_of(REPLACEMENT)
    assert part in names.shared
    assert (names.representatives == part).sum() > 100  # bytes that are no character of their own
    assert names.token_of("nothing like a token") is None
    assert (names.end, names.token_of("</s>")) == (0, 0)
    assert names.token_of("") in names.shared  # the tokens that the tokenizer does not know


def test_all_ends_of_texts_are_one_group() -> None:
    names = TokenNames(tiny_tokenizer(), 300, {0, 2}, special=True)
    assert names.end == names.token_of("</s>") == names.token_of("<assistant>") == 0
    assert names.representatives[:4].tolist() == [0, 1, 0, 3]
    assert 0 not in names.shared


@pytest.mark.parametrize("end", [0, 2])
def test_special_tokens_without_a_text_join_the_end(end: int) -> None:
    names = TokenNames(tiny_tokenizer(), 300, {end}, special=False)
    assert names.token_of("") == end
    assert names.representatives[:4].tolist() == [end] * 4


def test_probabilities_of_a_group_are_added() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_llama(vocab=300)
    names = TokenNames(tokenizer, 300, {0}, special=True)
    sampling = {"temperature": 1.0, "top_k": 0}
    ((_, own),) = Reference(model, [1, 2], sampling).distributions([()])
    reference = NamedReference(model, [1, 2], sampling, names)
    ((_, grouped),) = reference.distributions([()])
    part = names.token_of(REPLACEMENT)
    assert part is not None
    assert float(grouped.sum()) == pytest.approx(1.0)
    assert float(grouped[part]) == pytest.approx(float(own[names.representatives == part].sum()))
    alone = torch.tensor([token for token in range(300) if token not in names.shared])
    alone = alone[names.representatives[alone] == alone]
    assert torch.equal(grouped[alone], own[alone])
    assert reference.ends(part)
    assert not reference.ends(int(alone[5]))
