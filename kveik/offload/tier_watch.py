"""Notices what becomes of the tiers, and decides what of it is worth a line of the log. Pure; time is passed in.

Of each tier what is wrong is compared with what was told. That something went wrong is told at once, that it is well when it
has been for a while; where lines have been many, both wait, and what has come and gone meanwhile is one number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from kveik.observe.events import Event, RecordsDamaged, TierChanged

SETTLED_SECONDS = 1.0
"""So long all must have been well before that is told: a tier that is tried again may seem to be for a moment."""

LINES_MOST, LINES_SECONDS = 6, 60.0
"""So many changes of a tier are told in so much time; three things can go wrong at once, and become well one by one."""

DAMAGED_SECONDS = 60.0
"""At least between two lines on damaged records."""


class TierWatch:
    """What was told of each tier, and what is to be told."""

    def __init__(self, names: Sequence[str], publish: Callable[[Event], None]) -> None:
        self._tiers = {name: _Watched(name) for name in names}
        self._publish = publish

    @property
    def unsettled(self) -> bool:
        """Whether there is something to tell that has to wait."""
        return any(tier.unsettled for tier in self._tiers.values())

    def look(self, tier: str, hindrances: Mapping[str, str], now: float, *, last: bool = False) -> None:
        """This is wrong with it now; `last`: nobody will look again, so that nothing can wait."""
        watched = self._tiers[tier]
        for event in (watched.changed(hindrances, now, last=last), watched.damaged(now, last=last)):
            if event is not None:
                self._publish(event)

    def count_damaged(self, tier: str, records: int) -> None:
        """So many records were not what they should be."""
        self._tiers[tier].records_damaged += records


class _Watched:
    def __init__(self, name: str) -> None:
        self.name = name
        self.records_damaged = 0
        """Not told yet."""
        self._damaged_told = float("-inf")
        self._told: dict[str, str] = {}
        self._wrong: dict[str, str] = {}
        self._well_since: dict[str, float] = {}
        self._faults = 0
        self._lines: deque[float] = deque(maxlen=LINES_MOST)

    @property
    def unsettled(self) -> bool:
        waits = self._told.keys() - self._wrong.keys() - ({"store"} if self._wrong else set())
        return bool(waits or self._wrong.keys() - self._told.keys()) or self.records_damaged > 0

    def changed(self, hindrances: Mapping[str, str], now: float, *, last: bool) -> TierChanged | None:
        if not hindrances and not self._wrong and not self._told:
            return None
        self._note(hindrances, now)
        # What has only just become well counts as wrong still, with the reason that was told.
        settling = {part: why for part, why in self._told.items() if not last and self._settles(part, now)}
        state = settling | self._wrong
        shown = dict(state)
        if state and "store" in self._told:
            # It may forget its trouble over something that went well, while a half is still left alone: no news yet.
            state = {"store": self._told["store"]} | state
        full = len(self._lines) == LINES_MOST and now - self._lines[0] < LINES_SECONDS
        if state.keys() == self._told.keys() or (full and not last):
            return None
        worse, faults = not state.keys() <= self._told.keys(), self._faults
        self._told, self._faults = state, 0
        self._lines.append(now)
        return TierChanged(self.name, shown, worse, faults)

    def damaged(self, now: float, *, last: bool) -> RecordsDamaged | None:
        if not self.records_damaged or (now - self._damaged_told < DAMAGED_SECONDS and not last):
            return None
        records, self.records_damaged, self._damaged_told = self.records_damaged, 0, now
        return RecordsDamaged(self.name, records)

    def _note(self, hindrances: Mapping[str, str], now: float) -> None:
        for part in self._wrong.keys() - hindrances.keys():
            self._well_since[part] = now
        self._faults += bool(hindrances.keys() - self._wrong.keys() - ({"store"} if self._wrong else set()))
        self._wrong = dict(hindrances)

    def _settles(self, part: str, now: float) -> bool:
        return part not in self._wrong and now - self._well_since[part] < SETTLED_SECONDS
