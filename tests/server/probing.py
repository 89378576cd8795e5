"""Probes of a server, from a process of its own: python -m tests.server.probing HOST PORT PID, until its input ends.

Prints one pair per probe: seconds until the answer, and the server's own part of them. What is taken off is the time in which a
thread of the server (PID) could have run and waited for a processor, or in which everybody was stopped. A server that computes,
sleeps or waits for a lock gets nothing off.
"""

from __future__ import annotations

import json
import select
import sys
import threading
import time
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path

PATHS = ("/health", "/metrics")
PAUSE_SECONDS = 0.02


def tells() -> bool:
    """Whether the system says how long threads wait for a processor."""
    return Path("/proc/self/schedstat").exists()


class Sleeper:
    """Somebody who has nothing to do and wakes up often: late where the machine, or all processes together, stood still."""

    def __init__(self) -> None:
        self._state = 0.0, time.monotonic() + PAUSE_SECONDS
        threading.Thread(target=self._sleep, daemon=True).start()

    def late(self) -> float:
        """Seconds, of all its sleeps, the one that has not ended included."""
        late, due = self._state
        return late + max(time.monotonic() - due, 0.0)

    def _sleep(self) -> None:
        while True:
            time.sleep(PAUSE_SECONDS)
            self._state = self.late(), time.monotonic() + PAUSE_SECONDS


class Waits:
    """Seconds so far in which others had the processors, by who waited: each thread of the server and of the probe."""

    def __init__(self, server: str) -> None:
        self._folders = [Path(f"/proc/{process}/task") for process in (server, "self")]
        self._sleeper = Sleeper()

    def now(self) -> dict[str, float]:
        waits = {"sleeper": self._sleeper.late()}
        for thread in (one for folder in self._folders for one in folder.iterdir()):
            # It may have ended since it was listed.
            with suppress(OSError):
                waits[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
        return waits

    def longest_since(self, before: dict[str, float]) -> float:
        """Threads wait at the same time as well as in turn: the longest wait is what surely was not the server's."""
        return max(seconds - before.get(who, 0.0) for who, seconds in self.now().items())


def probe(host: str, port: int, path: str, waits: Waits) -> tuple[float, float]:
    """Seconds until the answer, and the server's part of them."""
    before, begun = waits.now(), time.monotonic()
    connection = HTTPConnection(host, port)
    connection.request("GET", path)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    assert answer.status == 200
    seconds = time.monotonic() - begun
    return seconds, seconds - waits.longest_since(before)


def main() -> None:
    host, port, server = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    probes, waits = [], Waits(server)
    while not select.select([sys.stdin], [], [], PAUSE_SECONDS)[0]:
        probes += [probe(host, port, path, waits) for path in PATHS]
    print(json.dumps(probes))


if __name__ == "__main__":
    main()
