"""Record of one block of one layer group: a header of 128 bytes by which it is verified, and the payload.

    offset  bytes
         0      4   magic "KVKR"
         4      2   version of this layout
         6      1   encoding of the payload
         7      1   0
         8      4   number of the layer group
        12      4   tokens
        16      8   bytes of the payload
        24     32   fingerprint: model, weights, type of keys and values, block size, shape of the group
        56     32   key of the block: covers everything its content depends on
        88     24   0
       112     16   XXH3-128 of all before it and of the payload
       128      …   payload

Numbers are little-endian. The checksum finds accidents, not attacks: whatever can write into a store can forge records.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NamedTuple

import xxhash

MAGIC = b"KVKR"
VERSION = 1
DIGEST_BYTES = 32
"""Size of a fingerprint, and of a block's key."""

CHECKSUM_BYTES = 16
HEADER_BYTES = 128
_CHECKED = HEADER_BYTES - CHECKSUM_BYTES
_HEADER = struct.Struct("<4sHBxIIQ32s32s24x")
assert _HEADER.size == _CHECKED


class Encoding(IntEnum):
    """How the payload holds a block."""

    RAW = 0
    """Byte for byte as in the pool."""

    INT8 = 1
    """Rows of int8, then their scales: see `encode.py`."""


class Miss(StrEnum):
    """Why a record was not loaded."""

    ABSENT = "absent"
    """The store does not have it."""

    TORN = "torn"
    """Too short, too long, or no record of this layout."""

    FOREIGN = "foreign"
    """It is of another model, another group or another block."""

    DAMAGED = "damaged"
    """The checksum is wrong."""

    LATE = "late"
    """The deadline passed, or nobody waits for it any more."""

    REFUSED = "refused"
    """Not tried: reads of the tier are stopped after failures, or too many wait."""

    FAILED = "failed"
    """The store could not read."""


class Refusal(StrEnum):
    """Why a record was not stored."""

    FULL = "full"
    """The store's bound is reached."""

    DROPPED = "dropped"
    """Staging is full: blocks come faster than the store writes."""

    REFUSED = "refused"
    """Not tried: writes to the tier are stopped after failures, or it is closing."""

    FAILED = "failed"
    """The store could not write."""


class RecordKey(NamedTuple):
    """Key of a record."""

    group: int
    """Number of the layer group."""

    block: bytes
    """The block's chained key, 32 bytes."""


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """Format of every record of one layer group in one tier."""

    fingerprint: bytes
    group: int
    tokens: int
    encoding: Encoding
    payload_bytes: int

    def __post_init__(self) -> None:
        assert len(self.fingerprint) == DIGEST_BYTES, "a fingerprint has 32 bytes"
        assert self.payload_bytes > 0

    @property
    def record_bytes(self) -> int:
        return HEADER_BYTES + self.payload_bytes

    def seal(self, record: memoryview, block: bytes) -> None:
        """Write the header in front of the payload, which stands in `record` from HEADER_BYTES on already."""
        assert len(record) == self.record_bytes, "the record has another size than its format says"
        assert len(block) == DIGEST_BYTES, "a block's key has 32 bytes"
        head = _HEADER.pack(MAGIC, VERSION, self.encoding, self.group, self.tokens, self.payload_bytes, self.fingerprint, block)
        record[:_CHECKED] = head
        record[_CHECKED:HEADER_BYTES] = _checksum(head, record[HEADER_BYTES:])

    def verify(self, record: memoryview, key: RecordKey) -> memoryview | Miss:
        """The payload, as a view of `record`, or why it must not be used. Reads every byte."""
        if len(record) < HEADER_BYTES:
            return Miss.TORN
        payload = record[HEADER_BYTES:]
        return self.verify_parts(record[:HEADER_BYTES], payload, key) or payload

    def verify_parts(self, header: memoryview, payload: memoryview, key: RecordKey) -> Miss | None:
        """The same for a record whose header and payload lie apart; None: it is the record asked for."""
        magic, version, encoding, group, tokens, size, fingerprint, block = _HEADER.unpack_from(header)
        if magic != MAGIC or version != VERSION or size != len(payload):
            return Miss.TORN
        found = (fingerprint, group, tokens, encoding, size)
        if found != self._identity or group != key.group or block != key.block:
            return Miss.FOREIGN
        if header[_CHECKED:] != _checksum(header[:_CHECKED], payload):
            return Miss.DAMAGED
        return None

    @property
    def _identity(self) -> tuple[bytes, int, int, int, int]:
        return self.fingerprint, self.group, self.tokens, self.encoding, self.payload_bytes


def _checksum(head: bytes | memoryview, payload: memoryview) -> bytes:
    digest = xxhash.xxh3_128(head)
    digest.update(payload)
    return digest.digest()
