"""Small ledgers for tests, and the few moves a sequence makes in them."""

from __future__ import annotations

from collections.abc import Sequence

from kveik.cache.layout import LayerGroup
from kveik.cache.ledger import Admission, CacheLedger


def ledger(
    blocks: int | Sequence[int] = 16,
    *,
    windows: Sequence[int | None] = (None,),
    block_size: int = 4,
    rows: int = 4,
    max_model_len: int = 32,
    max_chunk: int | None = None,
    caching: bool = True,
) -> CacheLedger:
    """Blocks of 4 tokens, so that a reader can count along."""
    groups = [LayerGroup((number,), 1, 2, window) for number, window in enumerate(windows)]
    counts = [blocks] * len(groups) if isinstance(blocks, int) else list(blocks)
    return CacheLedger(
        groups,
        counts,
        block_size=block_size,
        rows=rows,
        max_model_len=max_model_len,
        max_chunk=max_chunk,
        enable_prefix_caching=caching,
    )


def enter(ledger: CacheLedger, sequence_id: int, tokens: Sequence[int], *, salt: str | None = None, request: str = "r") -> None:
    """Open only."""
    ledger.open(sequence_id, list(tokens), request=request, salt=salt)


def admit(
    ledger: CacheLedger, sequence_id: int, tokens: Sequence[int], *, salt: str | None = None, request: str = "r"
) -> Admission:
    """Open, take what is found, and have room for all tokens."""
    enter(ledger, sequence_id, tokens, salt=salt, request=request)
    match = ledger.match(sequence_id, len(tokens) - 1)
    assert ledger.can_admit(sequence_id, match)
    admission = ledger.admit(sequence_id, match, len(tokens))
    ledger.grow(sequence_id, len(tokens))
    ledger.check()
    return admission


def compute(
    ledger: CacheLedger, sequence_id: int, tokens: Sequence[int], *, salt: str | None = None, request: str = "r"
) -> Admission:
    """Admit, and finish the step that computes everything."""
    admission = admit(ledger, sequence_id, tokens, salt=salt, request=request)
    ledger.commit(sequence_id, len(tokens))
    ledger.check()
    return admission


def leave(ledger: CacheLedger, sequence_id: int, computed: int) -> None:
    """Release and close."""
    ledger.release(sequence_id, computed)
    ledger.close(sequence_id)
    ledger.check()


def serve(
    ledger: CacheLedger, sequence_id: int, tokens: Sequence[int], *, salt: str | None = None, request: str = "r"
) -> Admission:
    """A whole life: computed, and gone."""
    admission = compute(ledger, sequence_id, tokens, salt=salt, request=request)
    leave(ledger, sequence_id, len(tokens))
    return admission
