"""Texts that name persons are detected, and other texts with capitalized words are kept."""

import pytest

from training.data.persons import common_words, names_person

COMMON = common_words(
    [
        "the machine is learning and new deep models are read by the dear state department",
        "however the great writer wrote about the solar system in the morning",
    ]
)


@pytest.mark.parametrize(
    "text",
    [
        "It was Ada Lovelace who wrote it.",
        "The painter Vincent van Gogh was Dutch.",
        "Ask Dr. Miller about it.",
        "The books of J. K. Rowling are long.",
        "Emily Brontë wrote one novel.",
        "Jean-Luc Picard gave the order.",
        "Émile Zola and LeBron James never met.",
        "Ask Conor O'Brien.",
    ],
)
def test_persons_are_found(text: str) -> None:
    assert names_person(text, COMMON)


@pytest.mark.parametrize(
    "text",
    [
        "Machine Learning and Deep Learning are related.",
        "However, the Great Writer is unknown.",
        "In Paris, it rains. Berlin is dry.",
        "- Solar System\n- State Department",
        "HTML and CSS",
    ],
)
def test_other_texts_are_kept(text: str) -> None:
    assert not names_person(text, COMMON)


def test_a_word_that_is_almost_always_capitalized_is_not_common() -> None:
    assert common_words(["Anna likes anna.", "Anna " * 20]) >= {"likes"}
    assert "anna" not in common_words(["Anna likes anna.", "Anna " * 20])
