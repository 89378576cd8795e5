"""How our commands look and load: plain help with headings, and modules that are imported only when their command runs."""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

WIDTH = {"max_content_width": 110}


class Command(TyperCommand):
    """A command whose help keeps long names whole and gathers its options under the headings of their slices.

    typer's own boxes cut `--long-prefill-token-threshold` off at 80 columns, and a flag that is cut off cannot be typed.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = defaultdict(list, {"Arguments": []})
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
                sections[getattr(parameter, "rich_help_panel", None) or usual].append(record)
        for heading, records in sections.items():
            if not records:
                continue
            with formatter.section(heading):
                formatter.write_dl(records)


class LazyGroup(TyperGroup):
    """A group of commands of which each is imported when it is called.

    Importing torch takes seconds, and `kveik --help` or `kveik models` should not wait for it. The group itself holds a stub
    for each command, with its name and summary; `resolve_command` puts the real one in its place.
    """

    modules: dict[str, str]
    """Command name -> module that defines `app`, a `typer.Typer`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, stub, rest = super().resolve_command(ctx, args)
        return name, stub if name is None else load(self.modules[name]), rest


def load(module: str) -> Any:
    """The command that a module's `app` describes."""
    # Not an import hidden from the stairs: nothing lies above kveik.cli, and tests/cli loads every module named here.
    return typer.main.get_command(importlib.import_module(module).app)


def single(command: Callable[..., None]) -> typer.Typer:
    """The app of a module with one command."""
    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    app.command(cls=Command, context_settings=WIDTH)(command)
    return app
