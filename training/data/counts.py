"""What became of the data on its way to the drafter; nothing is left out silently."""

from collections.abc import Iterator
from typing import Literal

from jakiro.utils.settings import Settings

Fill = Literal["texts", "all"]  # kinds of documents that are split to fill rows


class ReadCounts(Settings):
    """What was read.

    Attributes:
        rows: of the data.
        skipped: rows that cannot be used, left out as wished.
        dropped: documents without a second token: nothing follows anything.
        documents: that were kept; conversations can have one for each answer.
        tokens: in them.
        responses: tokens that the drafter learns to guess.
        highest_id: the largest token id.
    """

    rows: int
    skipped: int
    dropped: int
    documents: int
    tokens: int
    responses: int
    highest_id: int


class PackCounts(Settings):
    """What was packed.

    Attributes:
        documents: that were to be packed.
        split: into several pieces, because they are longer than a row, or to fill rows.
        left_out: pieces of these without a response, or of one token.
        left_out_tokens: in such pieces.
        rows: packed ones.
        padding: share of their tokens.
        filled_with: which documents that fit into a row were split to fill rows; None for none.
        wider_split: a setting by which more would be split, looked for where there is much padding.
    """

    documents: int
    split: int
    left_out: int
    left_out_tokens: int
    rows: int
    padding: float
    filled_with: Fill | None = None
    wider_split: Fill | None = None


class DataCounts(Settings):
    """From rows of data to packed rows."""

    read: ReadCounts
    packed: PackCounts

    def lines(self) -> Iterator[str]:
        """Yield what to tell the user."""
        read, packed = self.read, self.packed
        yield (
            f"{read.rows:,} rows read, {read.skipped:,} skipped; {read.documents:,} documents, "
            f"{read.dropped:,} more dropped that have no second token"
        )
        share = read.responses / read.tokens
        yield f"{read.tokens:,} tokens, {read.responses:,} of them of responses ({share:.0%})"
        yield (
            f"{packed.documents:,} documents packed into {packed.rows:,} rows with "
            f"{packed.padding:.1%} padding; {packed.split:,} were split, {packed.left_out:,} of "
            "their pieces left out for want of a response or of a second token "
            f"({packed.left_out_tokens:,} tokens)"
        )
