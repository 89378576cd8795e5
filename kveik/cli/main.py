"""Front door of the command line: finds the command, and turns every error into one message and an exit code.

Exit codes: 0 done, 1 refused or broken, 2 a command that was typed wrongly, 130 interrupted.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import MutableMapping, Sequence
from contextlib import ExitStack

from kveik import __version__
from kveik.cli.command import Command, WrongLine, page
from kveik.cli.commands import COMMANDS, GROUPS
from kveik.cli.fetch import with_model
from kveik.cli.options import MODEL
from kveik.cli.start import INTERRUPTED, end_at_once_on_ctrl_c, say, show
from kveik.errors import KveikError
from kveik.machine.allocator import bound_memory

HELP = """An LLM inference server whose key/value cache is paged, shared and explainable.

  kveik serve                       serve smollm2-135m on http://127.0.0.1:8000
  kveik chat qwen2.5-coder-0.5b     talk to a model; fetches it the first time
  kveik generate -p "Once upon"     complete a prompt
  kveik models                      list the models that can be had by name

kveik COMMAND --help tells more about each."""
OPTIONS = {"--version": "Print the version and stop.", "--help": "Show this message and exit."}

SPIN_COUNT = "5000"
"""Rounds of libgomp's waiting loop: as fast as endless spinning on an otherwise idle machine; 2,000 cost 8 % there."""


def run(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code. Nothing that we refuse or that breaks leaves a traceback."""
    path, words = _parted(arguments)
    try:
        return _run(path, words)
    except WrongLine as error:
        return _complain(f"{error}\n'{path} --help' lists what there is.", 2)
    except KveikError as error:
        return _complain(error.message, 1)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # What is still buffered for a reader that has gone away would fail once more at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parted(arguments: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The command as typed, `kveik cache ls`, and the words after it."""
    for count in (2, 1):
        name = " ".join(arguments[:count])
        if name in COMMANDS or name in GROUPS:
            return f"kveik {name}", arguments[count:]
    return "kveik", arguments


def _run(path: str, words: Sequence[str]) -> int:
    name = path.partition(" ")[2]
    if name in COMMANDS:
        return _run_command(COMMANDS[name], path, words)
    inside = {
        full.removeprefix(name).split()[0]: command
        for full, command in COMMANDS.items()
        if f"{full} ".startswith(f"{name} ".lstrip())
    }
    if not name and words[:1] == ["--version"]:
        show(f"kveik {__version__}")
    elif (not name and not words) or words[:1] == ["--help"]:
        summaries = {word: command.summary if name else GROUPS.get(word, command.summary) for word, command in inside.items()}
        sections = {"Options": OPTIONS, "Commands": summaries} if not name else {"Commands": summaries}
        show(page(f"{path} COMMAND [OPTIONS]", GROUPS[name] if name else HELP, sections))
    elif words:
        near = difflib.get_close_matches(words[0], inside, n=1)
        raise WrongLine(f"There is no command '{words[0][:50]}'.{f' Did you mean {near[0]}?' if near else ''}")
    else:
        raise WrongLine(f"{path} needs a command: {', '.join(inside)}.")
    return 0


def _run_command(command: Command, path: str, words: Sequence[str]) -> int:
    read = command.read(words)
    if read is None:
        show(command.help(path))
        return 0
    settings, own = read
    with ExitStack() as held:
        if command.prepare is not None:
            command.prepare(settings, own, held)
        if MODEL in command.slices:
            own["config"] = with_model(settings.engine)
            say(f"loading {settings.engine.model.model} ...")
        module, _, function = command.runs.partition(":")
        # Not an import hidden from the stairs: nothing lies above kveik.cli, and tests/cli loads every module named there.
        code = getattr(importlib.import_module(module), function)(*([settings] if command.slices else []), **own)
        return int(code or 0)


def _complain(message: str, code: int) -> int:
    print(f"kveik: {message}", file=sys.stderr)  # noqa: T201  # the one place that speaks to the user about errors
    return code


def main() -> None:
    """The `kveik` command, once it is loaded."""
    end_at_once_on_ctrl_c()
    bound_spinning(os.environ)
    bound_memory(os.environ)
    sys.exit(run(sys.argv[1:]))


def bound_spinning(environment: MutableMapping[str, str]) -> None:
    """Let OpenMP's threads wait awake for about 0.1 ms at most; to be called before torch is loaded.

    By default they spin for milliseconds, and where another process wants a core they keep it from the very thread that they
    wait for: beside one busy process, decoding alone then takes 20 times as long. A policy that the user has set stays.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
