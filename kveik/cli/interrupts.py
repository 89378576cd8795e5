"""What Ctrl-C does: it ends the process at once with code 130, except where there is something to put right first.

Python turns the signal into an exception wherever the interpreter happens to be. While modules are being imported, that is
inside somebody else's code, which takes it for an import that failed, prints it with a traceback, or swallows it.
"""

from __future__ import annotations

import os
import signal

INTERRUPTED = 130


def end_at_once_on_ctrl_c() -> None:
    """From now on Ctrl-C ends the process without another word. For the main thread of a process that is ours."""
    signal.signal(signal.SIGINT, _end)


def _end(*_: object) -> None:
    # Nothing is flushed and nobody is told: what has been said so far was flushed where it was said.
    os._exit(INTERRUPTED)


class interruptible:  # noqa: N801  # a context manager; contextlib would have to be imported first
    """Inside, Ctrl-C is `KeyboardInterrupt` again. Changes nothing where it does not end the process at once anyway."""

    def __enter__(self) -> None:
        self._lifted = signal.getsignal(signal.SIGINT) is _end
        if self._lifted:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *_: object) -> None:
        if self._lifted:
            signal.signal(signal.SIGINT, _end)
