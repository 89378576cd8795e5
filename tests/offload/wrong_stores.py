"""Stores that do what stores should not: raise, take their time, answer nonsense. Everything else they do as memory does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kveik.clock import Clock
from kveik.offload.stores.ram import RamStore
from kveik.offload.stores.record import Miss, RecordFormat, RecordKey, Refusal
from kveik.offload.stores.store import Direct, Use


class WrongStore(RamStore):
    """Before each batch it asks `puts` or `gets`, which may raise, move the clock, or give an answer of their own."""

    def __init__(self, formats: Sequence[RecordFormat], capacity_bytes: int, clock: Clock, name: str = "ram") -> None:
        super().__init__(formats, capacity_bytes, clock)
        self.name = name
        self.clock = clock
        self.puts: Callable[[int], list[Refusal | None] | None] = lambda number: None
        self.gets: Callable[[int], Sequence[Miss | None] | None] = lambda number: None
        self.shown: Callable[[int, memoryview], memoryview] = lambda number, record: record
        self.put_batches = self.get_batches = self.gets_shown = 0

    def put_many(self, records: Sequence[tuple[RecordKey, memoryview]]) -> list[Refusal | None]:
        self.put_batches += 1
        answer = self.puts(self.put_batches)
        return super().put_many(records) if answer is None else answer

    def get_many(self, keys: Sequence[RecordKey], use: Use, deadline: float, direct: Direct | None = None) -> list[Miss | None]:
        self.get_batches += 1
        answer = self.gets(self.get_batches)

        def changed(number: int, record: memoryview) -> None:
            self.gets_shown += 1
            use(number, self.shown(self.gets_shown, record))

        return super().get_many(keys, changed, deadline) if answer is None else list(answer)


class Gate:
    """Something that stands still until it is let go."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, *_: object) -> None:
        self.reached.set()
        assert self.opened.wait(60)
