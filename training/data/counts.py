"""Counts of the data that was read, packed and dropped, so that nothing is dropped silently."""

from collections.abc import Iterator
from typing import Literal

from jakiro.utils.settings import Settings
from jakiro.utils.wording import counted

Fill = Literal["texts", "all"]  # kinds of documents that are split to fill sequences
TOLERATED_PADDING = 0.05  # as a fraction of the packed tokens


class ReadCounts(Settings):
    """Counts of the data that was read.

    Attributes:
        dropped: number of documents that were dropped because, with fewer than two tokens, they
            contain nothing to predict.
        unlearned: number of turns with the weight 0, from which nothing is learned.
        documents: number of documents kept; a conversation may have one for each answer.
    """

    records: int
    skipped: int
    unlearned: int = 0
    dropped: int
    documents: int
    tokens: int
    responses: int
    highest_id: int


class PackCounts(Settings):
    """Counts of the documents that were packed.

    Attributes:
        split: number of documents that were split, either because they are longer than a sequence
            or in order to fill sequences.
        left_out: number of dropped pieces, which have no response or only a single token.
        filled_with: kind of documents that were split to fill sequences, even if they are shorter
            than a sequence; None if no document was split for this purpose.
    """

    documents: int
    split: int
    left_out: int
    left_out_tokens: int
    sequences: int
    padding: float
    filled_with: Fill | None = None


class DataCounts(Settings):
    """Counts of all steps, from the records that were read to the packed sequences."""

    read: ReadCounts
    packed: PackCounts

    def lines(self) -> Iterator[str]:
        """Yield log lines that report the counts."""
        read, packed = self.read, self.packed
        dropped = f", {read.dropped:,} with fewer than two tokens dropped"
        yield (
            f"{counted(read.records, 'record')} read, {read.skipped:,} skipped; "
            f"{counted(read.documents, 'document')} kept{dropped if read.dropped else ''}"
        )
        fraction = read.responses / read.tokens
        if read.unlearned:
            yield f"{counted(read.unlearned, 'turn')} with the weight 0, which is not learned"
        tokens = counted(read.tokens, "token")
        yield f"{tokens}, {read.responses:,} of them in responses ({fraction:.0%})"
        parts = [
            f"{counted(packed.documents, 'document')} packed into "
            f"{counted(packed.sequences, 'sequence')} with {packed.padding:.1%} padding"
        ]
        if packed.split:
            parts.append(f"{counted(packed.split, 'document')} split")
        if packed.left_out:
            parts.append(
                f"{counted(packed.left_out, 'piece')} without a response or of fewer than two "
                f"tokens dropped ({counted(packed.left_out_tokens, 'token')})"
            )
        yield "; ".join(parts)
        if packed.padding > TOLERATED_PADDING and packed.sequences > 1:
            yield "there is much padding: try another data.split or data.sequence_length"
