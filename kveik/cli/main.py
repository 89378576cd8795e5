"""The command line's front door: which commands there are, and the one place where errors become a message and an exit code.

Exit codes: 0 done, 1 refused or broken, 2 a command that was typed wrongly, 130 interrupted.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import MutableMapping, Sequence

import typer

from kveik import __version__
from kveik.cli.command import WIDTH, Command, LazyGroup
from kveik.cli.foreign import advice_for
from kveik.cli.interrupts import INTERRUPTED, end_at_once_on_ctrl_c
from kveik.errors import KveikError
from kveik.machine.allocator import bound_memory

COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("kveik.cli.serve", "Serve a model with OpenAI's API, and a page at /."),
    "chat": ("kveik.cli.chat", "Talk to a model in the terminal."),
    "generate": ("kveik.cli.generate", "Complete prompts, many at once, without a server."),
    "models": ("kveik.cli.models", "List the models that can be had by name."),
    "pull": ("kveik.cli.pull", "Fetch a model and check it."),
    "plan": ("kveik.cli.plan", "Tell what fits: blocks, tokens, requests at once."),
    "cache": ("kveik.cli.cache", "Replay a trace of requests, or look at what a disk keeps."),
    "bench": ("kveik.cli.bench", "Measure this machine with a model."),
    "evaluate": ("kveik.cli.evaluate", "Tell what a configuration costs in quality, against a baseline."),
}
"""Name -> the module that holds it, and its summary, which is also the first line of its help."""


SPIN_COUNT = "5000"
"""Rounds of libgomp's waiting loop: as fast as endless spinning on a machine of one's own; 2,000 cost 8 % there."""
_PYDANTIC = re.compile(r"^(Invalid value for .+?: )Value error, ")
"""How it begins what a check of a value raised; typer passes it on."""


class Commands(LazyGroup):
    """All of kveik's commands."""

    modules = {name: module for name, (module, _) in COMMANDS.items()}  # noqa: RUF012  # a constant, set once per class


def build_app() -> typer.Typer:
    """The group with a stub for every command."""
    app = typer.Typer(
        cls=Commands, rich_markup_mode=None, add_completion=False, context_settings=WIDTH, invoke_without_command=True
    )
    app.callback()(_front)
    for name, (_, summary) in COMMANDS.items():
        app.command(name, help=summary, cls=Command)(_stub)
    return app


def _stub() -> None:
    raise AssertionError("LazyGroup puts the real command in this one's place")


def _front(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and stop."),
) -> None:
    """An LLM inference server whose key/value cache is paged, shared and explainable.

    \b
    kveik serve                       serve smollm2-135m on http://127.0.0.1:8000
    kveik chat qwen2.5-coder-0.5b     talk to a model; fetches it the first time
    kveik generate -p "Once upon"     complete a prompt
    kveik models                      what can be had by name

    kveik COMMAND --help tells more about each.
    """
    if version:
        typer.echo(f"kveik {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code. Nothing that we refuse or that breaks leaves a traceback."""
    try:
        command = typer.main.get_command(build_app())
        code = command.main(list(arguments), prog_name="kveik", standalone_mode=False)
    except typer.TyperException as error:
        return _complain(_usage(error, arguments), error.exit_code)
    except KveikError as error:
        return _complain(error.message, 1)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    return int(code or 0)


def _usage(error: typer.TyperException, arguments: Sequence[str]) -> str:
    option = getattr(error, "option_name", None)
    advice = advice_for(option, arguments) if option else None
    message = advice or _PYDANTIC.sub(r"\1", error.format_message()).removeprefix("Invalid value: ")
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "kveik"
    return f"{message}\n'{path} --help' lists what there is."


def _complain(message: str, code: int) -> int:
    print(f"kveik: {message}", file=sys.stderr)  # noqa: T201  # the one place that speaks to the user about errors
    return code


def main() -> None:
    """The `kveik` command, once it is loaded."""
    # Again, for whoever comes in by this door instead of `kveik.cli.start`.
    end_at_once_on_ctrl_c()
    bound_spinning(os.environ)
    bound_memory(os.environ)
    sys.exit(run(sys.argv[1:]))


def bound_spinning(environment: MutableMapping[str, str]) -> None:
    """Let OpenMP's threads wait awake for about 0.1 ms at most; to be called before torch is loaded.

    By default they spin for milliseconds, and where another process wants a core they keep it from the very thread that they
    wait for: beside one busy process, decoding alone then takes 20 times as long. Whoever has set a policy keeps it.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
