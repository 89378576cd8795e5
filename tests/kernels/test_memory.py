"""Memory for weights: pieces that lie apart, at the beginning of a line, in few chunks."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from kveik.errors import DoesNotFit
from kveik.kernels import memory
from kveik.kernels.memory import ALIGNMENT, Arena


def test_pieces_begin_with_a_line_and_do_not_touch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CHUNK", 10_000)
    arena, chance = Arena(), np.random.default_rng(0)
    pieces = [arena.take(int(size)) for size in chance.integers(1, 4000, 200)]
    for number, piece in enumerate(pieces):
        assert piece.ctypes.data % ALIGNMENT == 0
        assert not piece.any()
        piece[:] = number % 251
    assert all((piece == number % 251).all() for number, piece in enumerate(pieces))


def test_a_piece_larger_than_a_chunk_gets_one_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CHUNK", 4096)
    arena = Arena()
    assert [len(arena.take(size)) for size in (100, 50_000, 100)] == [100, 50_000, 100]


def test_more_memory_than_the_system_gives_is_refused_and_breaks_nothing() -> None:
    arena = Arena()
    with pytest.raises(DoesNotFit, match=rf"refuses {1 << 50} bytes of memory for weights"):
        arena.take(1 << 50)
    assert len(arena.take(100)) == 100


def test_memory_goes_with_its_pieces_and_the_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena()
    piece = arena.take(100)
    chunk = weakref.ref(piece.base)
    del arena
    gc.collect()
    assert chunk() is not None
    del piece
    gc.collect()
    assert chunk() is None
