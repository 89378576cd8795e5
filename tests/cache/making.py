"""Small KV cache managers for tests, and the few moves a sequence makes in them."""

from __future__ import annotations

from collections.abc import Sequence

from kveik.cache.kv_cache_manager import Admission, KVCacheManager
from kveik.cache.layout import LayerGroup


def kv_cache(
    blocks: int | Sequence[int] = 16,
    *,
    windows: Sequence[int | None] = (None,),
    block_size: int = 4,
    rows: int = 4,
    max_model_len: int = 32,
    max_chunk: int | None = None,
    caching: bool = True,
) -> KVCacheManager:
    """Blocks of 4 tokens, so that a reader can count along."""
    groups = [LayerGroup((number,), 1, 2, window) for number, window in enumerate(windows)]
    counts = [blocks] * len(groups) if isinstance(blocks, int) else list(blocks)
    return KVCacheManager(
        groups,
        counts,
        block_size=block_size,
        rows=rows,
        max_model_len=max_model_len,
        max_chunk=max_chunk,
        enable_prefix_caching=caching,
    )


def enter(
    kv_cache: KVCacheManager, sequence_id: int, tokens: Sequence[int], *, salt: str | None = None, request: str = "r"
) -> None:
    """Open only."""
    kv_cache.open(sequence_id, list(tokens), request=request, salt=salt)


def admit(
    kv_cache: KVCacheManager,
    sequence_id: int,
    tokens: Sequence[int],
    *,
    salt: str | None = None,
    request: str = "r",
    now: float = 0.0,
) -> Admission:
    """Open, take what is found, and have room for all tokens."""
    enter(kv_cache, sequence_id, tokens, salt=salt, request=request)
    match = kv_cache.match(sequence_id, len(tokens) - 1)
    assert kv_cache.can_admit(sequence_id, match)
    admission = kv_cache.admit(sequence_id, match, len(tokens), now)
    kv_cache.grow(sequence_id, len(tokens), now)
    kv_cache.check()
    return admission


def compute(
    kv_cache: KVCacheManager,
    sequence_id: int,
    tokens: Sequence[int],
    *,
    salt: str | None = None,
    request: str = "r",
    now: float = 0.0,
) -> Admission:
    """Admit, and finish the step that computes everything."""
    admission = admit(kv_cache, sequence_id, tokens, salt=salt, request=request, now=now)
    kv_cache.commit(sequence_id, len(tokens))
    kv_cache.check()
    return admission


def leave(kv_cache: KVCacheManager, sequence_id: int, computed: int, now: float = 0.0) -> None:
    """Release and close."""
    kv_cache.release(sequence_id, computed)
    kv_cache.close(sequence_id, now)
    kv_cache.check()


def serve(
    kv_cache: KVCacheManager,
    sequence_id: int,
    tokens: Sequence[int],
    *,
    salt: str | None = None,
    request: str = "r",
    now: float = 0.0,
) -> Admission:
    """A whole life: computed, and gone."""
    admission = compute(kv_cache, sequence_id, tokens, salt=salt, request=request, now=now)
    leave(kv_cache, sequence_id, len(tokens), now)
    return admission
