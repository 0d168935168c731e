"""The batch rules written as plainly as they can be, over Python lists of tokens; the loader is checked against this.

A global batch is always cut into eight pieces, or into as many as there are ranks where there are more than eight; up
to eight ranks see the same pieces, in the same order. A piece is (tokens, boundaries): T + 1 tokens, of which the first
T are the inputs and the last T the targets; and the starts of its documents within the inputs, closed by T.
"""

from collections.abc import Iterable, Iterator

Piece = tuple[list[int], list[int]]


def plain_training_batches(
    shards: list[list[int]], schedule: Iterable[tuple[int, int]], *, bos: int, ranks: int = 1
) -> Iterator[list[Piece]]:
    """One list of pieces for each (T, max_len) of the schedule, until that or the shards run out.

    Every document enters whole or, if it is longer than max_len or than the room left in its piece, cut; what is cut
    off is never seen. Where a shard has too few documents left, the whole partial batch is dropped and built anew from
    the next shard. Tokens before a shard's first BOS are never seen.
    """
    shard, cursor = 0, 0  # the shard in use, and how many of its documents are behind us
    for T, max_len in schedule:
        batch = None
        while batch is None:
            if shard == len(shards):
                return
            batch, cursor = _build_batch(shards[shard], cursor, T, max_len, max(8, ranks), bos)
            if batch is None:
                shard, cursor = shard + 1, 0
        yield batch


def _build_batch(tokens: list[int], cursor: int, T: int, max_len: int, pieces: int, bos: int):
    """(pieces, new cursor), or (None, cursor) where the shard has too few documents left."""
    starts = [i for i, token in enumerate(tokens) if token == bos]
    ends = starts[1:] + [len(tokens)]
    batch = []
    for _ in range(pieces):
        piece, lengths = [], []
        while len(piece) < T + 1:
            if cursor == len(starts):
                return None, cursor
            start = starts[cursor]
            end = min(ends[cursor], start + max_len, start + T + 1 - len(piece))
            piece += tokens[start:end]
            lengths.append(end - start)
            cursor += 1
        lengths[-1] -= 1  # the last token is a target only; this may leave an empty last document
        boundaries = [0]
        for length in lengths:
            boundaries.append(boundaries[-1] + length)
        batch.append((piece, boundaries))
    return batch, cursor


def plain_validation_batches(
    shards: list[list[int]], T: int, batches: int, *, bos: int, ranks: int = 1
) -> Iterator[list[Piece]]:
    """Contiguous pieces from the start of the first shard, whatever documents they cut.

    A shard with too little left for a global batch gives way to the next. The first boundary is 0 even where the first
    token is a BOS, so such a piece opens with an empty document.
    """
    pieces, shard, position = max(8, ranks), 0, 0
    for _ in range(batches):
        while shard < len(shards) and position + pieces * T + 1 >= len(shards[shard]):  # v3 wants one token to spare
            shard, position = shard + 1, 0
        if shard == len(shards):
            return
        batch = []
        for _ in range(pieces):
            tokens = shards[shard][position : position + T + 1]
            inside = [i for i, token in enumerate(tokens[:T]) if token == bos]
            batch.append((tokens, [0] + inside + [T]))
            position += T
        yield batch


def plain_cu_seqlens(boundaries: list[int], length: int) -> list[int]:
    """Boundaries at the fixed length that the model takes: the rest repeats the last, which is T."""
    assert len(boundaries) <= length, "more documents than cu_seqlens has room for"
    return boundaries + [boundaries[-1]] * (length - len(boundaries))
