"""What a tier is to the directory: its bound, what its records take there, and when they are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kveik.offload.write_filter import FACTOR

Writes = Literal["filtered", "write-through", "second-touch"]
"""When a record is written: when the tier above gives it up and it is worth it; as soon as it is there at all; when the tier
above gives it up and it was used twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSpec:
    """One tier, in numbers."""

    name: str
    capacity_bytes: int
    record_bytes: tuple[int, ...]
    """Per layer group, what one record takes there."""

    writes: Writes = "filtered"
    factor: float | None = FACTOR
    """Of the filter; None: everything that is offered is written. For policies that measure worth."""

    lasts: bool = False
    """Whether it outlives the process."""

    ours: bool = True
    """Whether we alone write and delete there; otherwise it has a bound of its own, and ours is on what we know of it."""

    def bytes_of(self, groups: int) -> int:
        total = 0
        for size in self.record_bytes:
            if groups & 1:
                total += size
            groups >>= 1
        return total
