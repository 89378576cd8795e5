"""Commands: the parts of a command, the reading of its line, and its help. Runs nothing."""

from __future__ import annotations

import argparse
import difflib
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from kveik.cli.config_file import read_config_file
from kveik.cli.options import Settings, every_setting
from kveik.cli.renamed_options import advice_for
from kveik.cli.setting import Setting, Slice, settings_of
from kveik.errors import BadValue

CONFIG = Setting(
    "config", Path, "TOML file with settings, named as here without the dashes in front; what is typed goes first."
)
WIDTH = 110
"""Columns that help fills at most."""

NAMES_WIDTH = 34
"""Columns for names, beyond which their help begins on the next line."""


class WrongLine(Exception):
    """The line was typed wrongly: exit code 2."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command. Its module is imported only when it runs, since importing torch takes seconds."""

    text: str
    """Help. The first line is the summary; an indented block keeps its lines."""

    runs: str
    """`module:function` that runs it, given the settings where there are slices, the model's configuration, and `own`."""

    slices: tuple[Slice, ...] = ()
    own: tuple[Setting, ...] = ()
    prepare: Callable[[Settings, dict[str, Any], ExitStack], None] | None = None
    """Makes of `own` what the function takes: all that can be refused before the module is imported.
    Whatever must be closed at the end goes onto the stack."""

    @property
    def summary(self) -> str:
        return self.text.partition("\n")[0]

    @property
    def settings(self) -> tuple[Setting, ...]:
        """Everything that its line may hold."""
        sliced = [setting for slice_ in self.slices for setting in settings_of(slice_)]
        return (*self.own, *([CONFIG] if sliced else []), *sliced)

    def read(self, words: Sequence[str]) -> tuple[Settings, dict[str, Any]] | None:
        """The configuration and the command's own values; None where help was asked for.

        Raises WrongLine.
        """
        words = _joined(self.settings, words)
        if advice := advice_for(words, {flag for setting in self.settings for flag in setting.flags}):
            raise WrongLine(advice)
        typed = _typed(self.settings, words)
        if typed is None:
            return None
        values = {setting.name: _value(setting, typed[setting.name]) for setting in self.settings}
        own = {one.name: one.default if values[one.name] is None else values[one.name] for one in self.own}
        try:
            filed = read_config_file(values["config"], every_setting()) if values.get("config") else {}
            given = {**filed, **{name: value for name, value in values.items() if value is not None}}
            return Settings(self.slices, given), own
        except BadValue as error:
            raise WrongLine(error.message) from error

    def help(self, path: str) -> str:
        """Everything about the command."""
        sections: dict[str, dict[str, str]] = {"Arguments": {}, "Options": {}}
        for setting in self.settings:
            sections.setdefault("Arguments" if setting.positional else setting.heading, {}).update([_row(setting)])
        sections["Options"]["--help"] = "Show this message and exit."
        places = [_shown(one) if one.required else f"[{_shown(one)}]" for one in self.settings if one.positional]
        return page(" ".join([path, "[OPTIONS]", *places]), self.text, sections)


def _joined(settings: Sequence[Setting], words: Sequence[str]) -> list[str]:
    """The same line with every option and its value in one word, so that a value may begin with a dash."""
    valued = {flag for setting in settings if setting.kind is not bool for flag in setting.flags}
    joined: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--":
            return [*joined, word, *rest]
        value = next(rest, None) if word in valued else None
        joined.append(word if value is None else f"{word}={value}")
    return joined


def _typed(settings: Sequence[Setting], words: Sequence[str]) -> dict[str, Any] | None:
    """Setting name -> text, list of texts, switch or None, as typed."""
    found, rest = _parser(settings).parse_known_intermixed_args(list(words))
    if found.help:
        return None
    for word in rest:
        if not word.startswith("-"):
            raise WrongLine(f"'{word[:50]}' is one argument too many.")
        near = difflib.get_close_matches(word, [flag for setting in settings for flag in setting.flags], n=1)
        raise WrongLine(f"There is no option {word[:50]}.{f' Did you mean {near[0]}?' if near else ''}")
    for setting in settings:
        if setting.required and getattr(found, setting.name) is None:
            raise WrongLine(f"{'' if setting.positional else 'Option '}{_shown(setting)} is missing.")
    return vars(found)


def _value(setting: Setting, typed: Any) -> Any:
    try:
        if isinstance(typed, list):
            return tuple(setting.parse(text) for text in typed)
        return setting.parse(typed) if isinstance(typed, str) else typed
    except BadValue as error:
        raise WrongLine(f"Invalid value for '{_shown(setting)}': {error.message}") from error


def _shown(setting: Setting) -> str:
    return setting.name.upper() if setting.positional else setting.flag


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise WrongLine(f"{message.removeprefix('argument ').capitalize()}.")


def _parser(settings: Sequence[Setting]) -> argparse.ArgumentParser:
    """Reads lines. Values stay text: `Setting.parse` reads them."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--help", action="store_true")
    for setting in settings:
        if setting.positional:
            parser.add_argument(setting.name, nargs="?")
        elif len(setting.flags) > 1 and setting.kind is bool:
            parser.add_argument(setting.flag, dest=setting.name, action=argparse.BooleanOptionalAction)
        elif setting.kind is bool:
            parser.add_argument(setting.flag, dest=setting.name, action="store_true")
        else:
            parser.add_argument(*setting.flags, dest=setting.name, action="append" if setting.many else "store")
    return parser


def _row(setting: Setting) -> tuple[str, str]:
    """The setting as typed, and its help."""
    help_ = setting.help if setting.default_text is None else f"{setting.help} [default: {setting.default_text}]"
    flags = ", ".join(setting.flags)
    if setting.positional or setting.kind is bool:
        return (_shown(setting) if setting.positional else flags), help_
    if setting.in_bytes:
        return f"{flags} BYTES", f"{help_} Units: 500MB (1000s), 1GiB or 1G (1024s)."
    form = "|".join(get_args(setting.kind)) if get_origin(setting.kind) is Literal else setting.kind.__name__.lower()
    return f"{flags} <{form}>", help_


def page(usage: str, text: str, sections: Mapping[str, Mapping[str, str]]) -> str:
    """A page of help. Names stay whole, however long: a flag that is cut off cannot be typed."""
    width = min(shutil.get_terminal_size().columns, WIDTH)
    # Indented paragraphs are examples and keep their lines.
    parts = [
        textwrap.indent(textwrap.dedent(part), "  ") if part.startswith(" ") else _wrapped(" ".join(part.split()), 2, width)
        for part in text.split("\n\n")
    ]
    rows = [f"{heading}:\n" + _rows(rows, width) for heading, rows in sections.items() if rows]
    return "\n\n".join([f"Usage: {usage}", *parts, *rows])


def _rows(rows: Mapping[str, str], width: int) -> str:
    indent = min(4 + max(map(len, rows)), NAMES_WIDTH)
    lines = []
    for name, help_ in rows.items():
        wrapped = _wrapped(help_, indent, width)
        lines.append(f"  {name}\n{wrapped}" if len(name) > indent - 4 else f"  {name:{indent - 2}}{wrapped[indent:]}")
    return "\n".join(lines)


def _wrapped(text: str, indent: int, width: int) -> str:
    blank = " " * indent
    return textwrap.fill(text, width, initial_indent=blank, subsequent_indent=blank, break_on_hyphens=False)
