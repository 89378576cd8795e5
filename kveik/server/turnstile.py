"""Lets calls in a few at a time, so that a crowd does not keep probes waiting."""

from __future__ import annotations

import asyncio
from collections import deque

PER_TURN = 16
"""Calls that begin in one turn of the event loop: about 10 ms of work."""


class Turnstile:
    """Calls pass in the order in which they came, at most `per_turn` in each turn of the event loop.

    Without it, thousands of calls that arrive in one turn are all parsed and refused before anything else is looked at,
    which takes seconds. Between two turns the loop looks at its sockets, so a probe waits for a few turns only.
    """

    def __init__(self, per_turn: int = PER_TURN) -> None:
        self._per_turn = per_turn
        self._left = per_turn
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._turning = False

    async def enter(self) -> None:
        """Returns when it is this call's turn; at once where there is no crowd."""
        loop = asyncio.get_running_loop()
        self._turn_soon(loop)
        if self._left and not self._waiting:
            self._left -= 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _turn_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._turning:
            self._turning = True
            loop.call_soon(self._turn, loop)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._turning = False
        self._left = self._per_turn
        while self._waiting and self._left:
            turn = self._waiting.popleft()
            # A call that was cancelled in the line has no turn to use up.
            if not turn.done():
                turn.set_result(None)
                self._left -= 1
        if self._left < self._per_turn:
            self._turn_soon(loop)
