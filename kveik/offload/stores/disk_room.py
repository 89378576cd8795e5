"""How many bytes of slots a disk has: as many as it may, or what there was when it was full, until it has more."""

from __future__ import annotations

PAUSE_SECONDS, PAUSE_SECONDS_MOST = 1.0, 300.0
"""Between two times that the file system is asked what is free: longer where it said more than there was, as under a quota."""


class DiskRoom:
    """A bound that follows a full disk. Pure; bytes and times come in."""

    def __init__(self, most: int, least: int) -> None:
        """`most`: the bound that was set; `least`: for one record of every group."""
        self.bytes = self._most = most
        self._least = least
        self._pause = PAUSE_SECONDS
        self._narrowed = self._again = float("-inf")
        self._believed = False
        """Whether there was said to be more, and nobody has found otherwise yet."""

    @property
    def is_narrow(self) -> bool:
        """Whether it is less than was set."""
        return self.bytes < self._most

    def may_ask(self, now: float) -> bool:
        """Whether it is time to ask what is free."""
        return self.is_narrow and now >= self._again

    def narrow(self, found: int, now: float) -> None:
        """The disk was full, and this is what it had."""
        if now - self._narrowed > 4 * self._pause:
            self._pause = PAUSE_SECONDS
        elif self._believed:
            self._pause = min(2 * self._pause, PAUSE_SECONDS_MOST)
        self._believed, self._narrowed, self._again = False, now, now + self._pause
        self.bytes = max(min(self.bytes, found), self._least)

    def widen(self, said: int, now: float) -> None:
        """The file system says that there is this much."""
        room = min(max(said, self.bytes), self._most)
        self._believed |= room > self.bytes
        self.bytes, self._again = room, now + self._pause
