"""Records for tests: made from a number, checked to the byte."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from functools import cache

from kveik.offload.stores.record import HEADER_BYTES, Encoding, Miss, RecordFormat, RecordKey
from kveik.offload.stores.store import Store

FINGERPRINT = b"f" * 32


def format_of(group: int, payload_bytes: int = 3000, encoding: Encoding = Encoding.RAW) -> RecordFormat:
    return RecordFormat(FINGERPRINT, group, 16, encoding, payload_bytes)


FORMATS = [format_of(0, 3000), format_of(1, 11000), format_of(2, 100)]
"""Slots of 4096, 12288 and 4096 bytes."""


def key_of(number: int, group: int = 0) -> RecordKey:
    return RecordKey(group, hashlib.sha256(b"%d" % number).digest())


@cache
def payload_of(number: int, size: int) -> bytes:
    return random.Random(number).randbytes(size)


@cache
def record_of(number: int, form: RecordFormat = FORMATS[0]) -> bytes:
    record = bytearray(HEADER_BYTES) + payload_of(number, form.payload_bytes)
    form.seal(memoryview(record), key_of(number).block)
    return bytes(record)


def pairs(numbers: Sequence[int], group: int = 0) -> list[tuple[RecordKey, memoryview]]:
    """What `put_many` takes."""
    return [(key_of(number, group), memoryview(record_of(number, FORMATS[group]))) for number in numbers]


def read(store: Store, numbers: Sequence[int], group: int = 0, deadline: float = 1e9) -> list[Miss | bytes]:
    """What each of these reads as: its payload, or why not."""
    keys, found = [key_of(number, group) for number in numbers], dict[int, Miss | bytes]()

    def use(at: int, record: memoryview) -> None:
        payload = FORMATS[group].verify(record, keys[at])
        found[at] = payload if isinstance(payload, Miss) else bytes(payload)

    for at, miss in enumerate(store.get_many(keys, use, deadline)):
        assert (miss is None) == (at in found)
        if miss is not None:
            found[at] = miss
    return [found[at] for at in range(len(keys))]


def payloads(numbers: Sequence[int], group: int = 0) -> list[bytes]:
    return [payload_of(number, FORMATS[group].payload_bytes) for number in numbers]
