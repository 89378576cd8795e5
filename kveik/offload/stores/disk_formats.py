"""What the slots of a folder hold, as its index says it in JSON: written by a store, read by whoever looks at one."""

from __future__ import annotations

import binascii
import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

from kveik.errors import Unreachable
from kveik.offload.stores.disk_check import in_words
from kveik.offload.stores.disk_files import FolderLock
from kveik.offload.stores.disk_index import AnotherLayout, DiskIndex, IndexBroken
from kveik.offload.stores.disk_owner import INDEX, LOCK
from kveik.offload.stores.record import DIGEST_BYTES, Encoding, RecordFormat

LOOKED_AT_BYTES = 1 << 30
"""Of an index, by whoever does not know its bound: sixteen million changes."""


def described(formats: Sequence[RecordFormat]) -> bytes:
    """What the slots of a folder hold, as the index has it; equal only for equal formats."""
    groups = [
        {"fingerprint": one.fingerprint.hex(), "tokens": one.tokens, "encoding": one.encoding, "bytes": one.payload_bytes}
        for one in formats
    ]
    return json.dumps({"groups": groups}).encode()


def _formats(description: bytes) -> list[RecordFormat]:
    """Raises ValueError where no store has written this."""
    try:
        groups = json.loads(description)["groups"]
        formats = [_format(number, **one) for number, one in enumerate(groups)]
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError("not a description") from error
    if not formats or described(formats) != description:
        raise ValueError("not as it is written")
    return formats


def _format(number: int, *, fingerprint: str, tokens: int, encoding: int, bytes: int) -> RecordFormat:
    digest = binascii.unhexlify(fingerprint)
    if len(digest) != DIGEST_BYTES or not 0 < bytes < 1 << 32:
        raise ValueError("not a format")
    return RecordFormat(digest, number, tokens, Encoding(encoding), bytes)


def formats_in(folder: Path) -> list[RecordFormat] | None:
    """The formats that a folder was written with, per group; None: it holds nothing. Raises Unreachable if it is damaged."""
    file = folder / INDEX
    if not file.exists():
        return None
    try:
        with (
            contextlib.closing(FolderLock(folder / LOCK, read_only=True)),
            contextlib.closing(DiskIndex(file, LOOKED_AT_BYTES, read_only=True)) as index,
        ):
            if index.too_long:
                raise IndexBroken("the index is longer than one can be")
            return None if index.description is None else _formats(index.description)
    except AnotherLayout as error:
        raise Unreachable(
            f"The folder {folder} was written by another version of kveik, and only that one can list or verify it. "
            "`kveik cache clear` empties it, and so does a server of this version that starts there."
        ) from error
    except OSError as error:
        raise Unreachable(f"The folder {folder} cannot be read: {in_words(error)}.") from error
    except (IndexBroken, ValueError) as error:
        raise Unreachable(
            f"The index of {folder} is damaged, so none of its records can be found. `kveik cache clear` empties the folder; a "
            "server that starts there keeps the index as index.damaged and begins anew."
        ) from error
