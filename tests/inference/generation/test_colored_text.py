"""Pieces of text keep the depth of their tokens."""

from helpers.tokenizers import TEXT, tiny_tokenizer

from inference.generation.streaming import (
    pieces_by_depth,
    terminal_legend,
    terminal_style,
)


def test_pieces_join_to_the_text_and_have_the_depths_of_their_tokens() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode(TEXT)
    pieces = list(pieces_by_depth(zip(ids, range(len(ids)), strict=True), tokenizer))
    assert "".join(piece.text for piece in pieces) == TEXT
    depths = [piece.depth for piece in pieces]
    assert depths == sorted(set(depths))
    assert depths[-1] == len(ids) - 1


def test_a_character_of_several_tokens_has_the_depth_of_the_last_one() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("🙂")
    assert len(ids) > 1
    depths = range(1, len(ids) + 1)
    assert [*pieces_by_depth(zip(ids, depths, strict=True), tokenizer)] == [("🙂", len(ids))]


def test_an_incomplete_character_is_not_lost() -> None:
    tokenizer = tiny_tokenizer()
    pieces = list(pieces_by_depth([(tokenizer.encode("🙂")[0], 2)], tokenizer))
    assert pieces == [("\N{REPLACEMENT CHARACTER}", 2)]


def test_depths_have_different_styles_up_to_the_deepest() -> None:
    styles = [terminal_style(depth) for depth in range(6)]
    assert len(set(styles)) == 6
    assert terminal_style(50) == styles[-1]
    legend = terminal_legend(range(9))
    assert legend.plain.endswith("drafts at depth 1, 2, 3, 4, 5 or deeper")
    assert [span.style for span in legend.spans] == styles[1:]
