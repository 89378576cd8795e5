"""The `kveik` command: the first of our modules to run, and light, so that Ctrl-C is in order before all else is imported."""

from __future__ import annotations

import importlib

from kveik.cli.interrupts import end_at_once_on_ctrl_c


def main() -> None:
    """Run the command line."""
    end_at_once_on_ctrl_c()
    # Not an import hidden from the stairs: it is late because it takes a tenth of a second, in which Ctrl-C may come.
    importlib.import_module("kveik.cli.main").main()
