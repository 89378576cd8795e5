"""Ctrl-C at every moment of a start: code 130, and not a word."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kveik.cli.start import interruptible

# The interpreter's own start takes some hundredths of a second, in which no handler of ours can be there; so it tells us.
START = (
    "import kveik.cli.start as i; i.end_at_once_on_ctrl_c(); print('set', flush=True); from kveik.cli.start import main; main()"
)
LOADED = "import sys, signal, os; import kveik.cli.start as i; i.end_at_once_on_ctrl_c(); {body}"


def ended(code: str, *arguments: str, after: float | None = None) -> tuple[int, str]:
    """Exit code and what was said on stderr, of a process that gets SIGINT so many seconds after the handler was set."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        if after is not None:
            assert process.stdout is not None
            assert process.stdout.readline() == "set\n"
            time.sleep(after)
            process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, said


def test_ctrl_c_inside_an_import_that_swallows_it_ends_the_process() -> None:
    body = "\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n    pass\nprint('went on')"
    assert ended(LOADED.format(body=body)) == (130, "")


def test_where_there_is_something_to_put_right_ctrl_c_is_an_exception_and_afterwards_it_is_not() -> None:
    body = (
        "\ntry:\n    with i.interruptible():\n        os.kill(os.getpid(), signal.SIGINT)\nexcept KeyboardInterrupt:\n"
        "    sys.stderr.write('put right')\n    sys.stderr.flush()\nos.kill(os.getpid(), signal.SIGINT)\nprint('went on')"
    )
    assert ended(LOADED.format(body=body)) == (130, "put right")


def test_whoever_handles_ctrl_c_otherwise_goes_on_to() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interruptible():
        assert signal.getsignal(signal.SIGINT) is before
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.model
@pytest.mark.parametrize("command", ["serve --port 0", "generate -p Once --max-tokens 400 --ignore-eos", "chat"])
@pytest.mark.parametrize("after", [0.2, 0.6, pytest.param("often", marks=pytest.mark.slow)])
def test_an_early_ctrl_c_is_130_and_leaves_no_traceback(
    command: str, after: float | str, catalogue_file: Callable[[str], Path]
) -> None:
    catalogue_file("smollm2-135m")
    for moment in [0.1 * tenths for tenths in range(30)] if isinstance(after, str) else [after]:
        code, said = ended(START, *command.split(), "--max-model-len", "512", after=moment)
        assert code == 130, (moment, said)
        assert "Traceback" not in said, (moment, said)
        assert "Exception ignored" not in said, (moment, said)
