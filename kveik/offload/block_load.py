"""Load of records into blocks of the pool, which can be called off at any moment.

    waiting ──begin──▶ copying ──end──▶ loaded
       │    ◀─withdraw──
       └── missed: not there, damaged, late, or called off

A record is read and verified while it is `waiting`, so `copying` is a copy of bytes that are in memory: `call_off` waits for
that at most. After it has returned nothing is written for this load any more.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from enum import Enum, auto

from kveik.offload.stores.record import Miss, RecordKey


class _State(Enum):
    WAITING = auto()
    COPYING = auto()
    LOADED = auto()
    MISSED = auto()


class BlockLoad:
    """Records, their blocks in the pool, the deadline, and the state of each record."""

    def __init__(self, load_id: int, records: Sequence[tuple[RecordKey, memoryview]], deadline: float) -> None:
        """`records`: keys, and the blocks in the pool that they are for."""
        self.load_id = load_id
        self.keys = tuple(key for key, _ in records)
        self.targets = [target for _, target in records]
        self.deadline = deadline
        self.called_off = False
        self.told = False
        """Its answer is on its way."""
        self._states = [_State.WAITING] * len(records)
        self._misses: list[Miss | None] = [None] * len(records)
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def misses(self) -> tuple[Miss | None, ...]:
        """Per record, once all have ended."""
        assert all(state in (_State.LOADED, _State.MISSED) for state in self._states)
        return tuple(self._misses)

    def so_far(self, numbers: range) -> list[Miss | None]:
        """Per record of these, the reason for which it does not come, if one is known."""
        return self._misses[numbers.start : numbers.stop]

    def begin(self, at: int, now: float) -> bool:
        """Start to copy a record; False: it is cancelled or late."""
        with self._changed:
            if self.called_off or now > self.deadline or self._states[at] is not _State.WAITING:
                self._miss(at, Miss.LATE)
                return False
            self._states[at] = _State.COPYING
            return True

    def withdraw(self, at: int) -> None:
        """The copy could not be made at once; the record waits as before, and the bytes written count for nothing."""
        with self._changed:
            assert self._states[at] is _State.COPYING
            self._states[at] = _State.WAITING
            self._changed.notify_all()

    def end(self, at: int, miss: Miss | None = None) -> None:
        """The copy is complete, or it broke off."""
        with self._changed:
            assert self._states[at] is _State.COPYING
            self._states[at] = _State.LOADED if miss is None else _State.MISSED
            self._misses[at] = miss
            self._changed.notify_all()

    def miss(self, at: int, why: Miss) -> None:
        """A record will not come; the first reason stays."""
        with self._changed:
            self._miss(at, why)

    def miss_rest(self, why: Miss) -> None:
        """Mark every waiting record as missed."""
        with self._changed:
            for at in range(len(self)):
                self._miss(at, why)

    def give_up(self, numbers: range) -> None:
        """The store is done with these: records neither brought nor missed have failed."""
        with self._changed:
            for at in numbers:
                if self._states[at] in (_State.WAITING, _State.COPYING):
                    self._states[at], self._misses[at] = _State.MISSED, Miss.FAILED
            self._changed.notify_all()

    def call_off(self) -> set[RecordKey]:
        """Write nothing from now on. Returns the records that had come before."""
        with self._changed:
            self.called_off = True
            self._changed.wait_for(lambda: _State.COPYING not in self._states)
            return {key for key, state in zip(self.keys, self._states, strict=True) if state is _State.LOADED}

    def _miss(self, at: int, why: Miss) -> None:
        if self._states[at] is _State.WAITING:
            self._states[at], self._misses[at] = _State.MISSED, why
