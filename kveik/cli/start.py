"""Start of the `kveik` process, Ctrl-C, and lines for the person at the terminal. Light: imports nothing slow.

Ctrl-C ends the process at once with code 130, except where there is something to put right first. Python turns the signal
into an exception wherever the interpreter happens to be. While modules are being imported, that is inside other packages' code,
which takes it for an import that failed, prints it with a traceback, or swallows it.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys

INTERRUPTED = 130


def main() -> None:
    """Run the command line."""
    end_at_once_on_ctrl_c()
    # Not an import hidden from the stairs: it comes after the handler, because Ctrl-C may arrive while it lasts.
    importlib.import_module("kveik.cli.main").main()


def say(line: str) -> None:
    """Prints one line on stderr, dimmed in a terminal, so that a command's result can be piped."""
    shown = f"\x1b[2m{line}\x1b[0m" if sys.stderr.isatty() and "NO_COLOR" not in os.environ else line
    print(shown, file=sys.stderr, flush=True)  # noqa: T201  # what a person reads beside the result


def show(text: str) -> None:
    """Prints a result on stdout."""
    print(text)  # noqa: T201  # what commands are run for


def end_at_once_on_ctrl_c() -> None:
    """From now on Ctrl-C ends the process without another word. For the main thread of a process that is ours."""
    signal.signal(signal.SIGINT, _end)


def _end(*_: object) -> None:
    # Nothing is flushed: every line was flushed where it was printed.
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
