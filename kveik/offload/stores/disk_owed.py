"""What is to be forgotten although a folder's index may name it still: a promise, which trouble delays and does not break."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from kveik.offload.stores.record import RecordKey

OWED_MOST = 65_536
"""Keys that are remembered one by one, some 13 MB. Beyond, all that the index names is to go, but for what the books have."""


class Owed:
    """Deletions of which the index does not know yet."""

    def __init__(self) -> None:
        self.keys: set[RecordKey] = set()
        self.everything = False
        """All that the index names, and that is in no open books."""

        self._records: int | None = 0
        """How many that may be, where it is everything; None: nobody knows."""

    def __bool__(self) -> bool:
        return self.everything or bool(self.keys)

    @property
    def records(self) -> int | None:
        """How many there are at most; None: nobody knows."""
        return self._records if self.everything else len(self.keys)

    def add(self, keys: Iterable[RecordKey]) -> None:
        """These are to go."""
        if not self.everything:
            self.keys.update(keys)
            if len(self.keys) > OWED_MOST:
                self.add_everything(len(self.keys))

    def add_everything(self, records: int | None) -> None:
        """All of them are, so many at most."""
        self.everything, self._records = True, records
        self.keys.clear()

    def covers(self, key: RecordKey) -> bool:
        return self.everything or key in self.keys

    def narrow(self, named: Collection[RecordKey]) -> None:
        """The index names these and no others, so that nothing else can come back."""
        if self.everything:
            self._records = len(named)
            self.everything = bool(named)
        else:
            self.keys.intersection_update(named)

    def settle(self) -> None:
        """The index names none of them any more."""
        self.keys.clear()
        self.everything = False
