"""Begin and end of a measurement that is run as a command."""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Callable
from pathlib import Path


def parser_of(name: str, doc: str) -> argparse.ArgumentParser:
    """Returns the parser of a measurement that can keep its figures."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=doc.partition("\n")[0])
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="keep the figures in this folder of pages")
    return parser


def run(main: Callable[[], None]) -> None:
    """Run it. Whoever reads may have read enough, as `head` does: then it ends with 1 and without a word, as `kveik` does."""
    try:
        _told(main)
    except BrokenPipeError:
        if _read(sys.stdout.fileno()):
            # The pipe is another program's.
            raise
        # Python flushes again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _told(main: Callable[[], None]) -> None:
    """Run it to the last word."""
    try:
        main()
    except SystemExit:
        sys.stdout.flush()
        raise
    sys.stdout.flush()


def _read(output: int) -> bool:
    """True while the other end is open, or where there is no pipe."""
    ends = select.poll()
    ends.register(output, 0)
    return not any(event & (select.POLLERR | select.POLLHUP) for _, event in ends.poll(0))
