"""A record that is not exactly what was asked for is a miss, never an error and never a wrong payload."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kveik.offload.stores.record import HEADER_BYTES, Encoding, Miss, RecordFormat, RecordKey

FORMAT = RecordFormat(fingerprint=bytes(range(32)), group=1, tokens=16, encoding=Encoding.RAW, payload_bytes=1000)
KEY = RecordKey(1, b"k" * 32)


def sealed(payload: bytes = b"\x5a" * 1000) -> bytearray:
    record = bytearray(FORMAT.record_bytes)
    record[HEADER_BYTES:] = payload
    FORMAT.seal(memoryview(record), KEY.block)
    return record


def test_a_sealed_record_gives_its_payload_back_without_a_copy() -> None:
    record = sealed(random.Random(1).randbytes(1000))
    payload = FORMAT.verify(memoryview(record), KEY)
    assert isinstance(payload, memoryview)
    assert payload == record[HEADER_BYTES:]
    assert payload.obj is record


def test_each_of_a_thousand_flipped_bits_is_a_miss() -> None:
    chance, record = random.Random(2), sealed(random.Random(3).randbytes(1000))
    for _ in range(1000):
        bit = chance.randrange(8 * len(record))
        record[bit // 8] ^= 1 << bit % 8
        assert FORMAT.verify(memoryview(record), KEY) in (Miss.TORN, Miss.FOREIGN, Miss.DAMAGED)
        record[bit // 8] ^= 1 << bit % 8
    assert not isinstance(FORMAT.verify(memoryview(record), KEY), Miss)


def test_each_bit_of_the_header_is_looked_at() -> None:
    record = sealed()
    for bit in range(8 * HEADER_BYTES):
        record[bit // 8] ^= 1 << bit % 8
        assert isinstance(FORMAT.verify(memoryview(record), KEY), Miss)
        record[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("size", [0, 1, 4, 24, 88, 112, 127, 128, 129, 628, 1127])
def test_a_record_cut_anywhere_is_torn(size: int) -> None:
    assert FORMAT.verify(memoryview(sealed())[:size], KEY) is Miss.TORN


def test_a_record_with_bytes_behind_it_is_torn() -> None:
    assert FORMAT.verify(memoryview(bytes(sealed()) + b"\0"), KEY) is Miss.TORN


@pytest.mark.parametrize(
    "other",
    [
        replace(FORMAT, fingerprint=b"f" * 32),
        replace(FORMAT, tokens=32),
        replace(FORMAT, encoding=Encoding.INT8),
        replace(FORMAT, payload_bytes=999),
    ],
    ids=["model", "block size", "encoding", "shape"],
)
def test_a_record_of_another_format_is_foreign(other: RecordFormat) -> None:
    assert other.verify(memoryview(sealed()), KEY) is Miss.FOREIGN


def test_the_record_of_another_block_or_group_is_foreign() -> None:
    record = memoryview(sealed())
    assert FORMAT.verify(record, RecordKey(1, b"l" * 32)) is Miss.FOREIGN
    assert FORMAT.verify(record, RecordKey(0, KEY.block)) is Miss.FOREIGN
    assert replace(FORMAT, group=0).verify(record, RecordKey(0, KEY.block)) is Miss.FOREIGN


def test_what_is_no_record_at_all_is_torn() -> None:
    for content in (b"\0" * 2000, b"KVKR" + b"\xff" * 2000, random.Random(4).randbytes(1128)):
        assert FORMAT.verify(memoryview(content), KEY) is Miss.TORN
