"""One setting: a field of a configuration dataclass, or an option of one command, with its name, type, default and help."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import re
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from kveik.errors import BadValue

SWITCH = {"on": True, "true": True, "off": False, "false": False}


@dataclass(frozen=True, slots=True)
class Drawn:
    """A default that is another one at every start."""

    draw: Callable[[], object]
    text: str
    """Shown in help in its place."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A configuration dataclass, or some of its fields, as a group of settings with a heading."""

    type: type[Any]
    heading: str
    names: tuple[str, ...] | None = None
    """Fields to offer; None: all that are not hidden."""

    defaults: Mapping[str, object] = field(default_factory=dict)
    """Defaults for fields that have none of their own, or another one here; `Drawn` for one that changes."""

    positional: str | None = None
    """The field that is given by its place on the line, without a flag."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One field, or one option of a single command, seen from outside."""

    name: str
    kind: Any
    """int, float, str, bool, Path or a Literal of strings: the type of one value."""

    help: str
    default: object = None
    _: KW_ONLY
    heading: str = "Options"
    many: bool = False
    """Whether it may be given several times."""

    positional: bool = False
    required: bool = False
    typed: tuple[str, ...] = ()
    """Flags in place of the one that the name makes."""

    least: float | None = None

    @property
    def in_bytes(self) -> bool:
        """Whether it is a number of bytes, which may be given with a unit."""
        return self.name.endswith("_bytes")

    @property
    def flag(self) -> str:
        """`--max-model-len` for `max_model_len`."""
        return self.typed[-1] if self.typed else "--" + self.name.replace("_", "-")

    @property
    def flags(self) -> tuple[str, ...]:
        """Everything that may be typed: a switch of a configuration has a name for either way."""
        both = self.kind is bool and self.heading != "Options"
        return (self.flag, f"--no-{self.flag[2:]}") if both else self.typed or (self.flag,)

    @property
    def default_text(self) -> str | None:
        """The default as one would type it; None where the help tells in words what happens without it."""
        if self.default is None or self.default == () or (self.kind is bool and self.heading == "Options"):
            return None
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        if isinstance(self.default, Drawn):
            return self.default.text
        return str(self.default)

    @property
    def kind_text(self) -> str:
        """The form of a value, for tables."""
        if get_origin(self.kind) is Literal:
            return " | ".join(get_args(self.kind))
        if self.in_bytes:
            return "bytes, as 500000000, 500MB or 1GiB"
        name = {int: "integer", float: "number", str: "text", bool: "switch", Path: "path"}[self.kind]
        return f"{name}, repeatable" if self.many else name

    def parse(self, text: str) -> object:
        """The value that a text stands for. Raises BadValue with the rest of a sentence that begins with the flag."""
        if get_origin(self.kind) is Literal:
            if text not in get_args(self.kind):
                raise BadValue(f"'{text[:50]}' is not one of {', '.join(get_args(self.kind))}.")
            return text
        if self.in_bytes:
            return parse_size(text)
        value: Any
        try:
            value = SWITCH[text.lower()] if self.kind is bool else _path(text) if self.kind is Path else self.kind(text)
        except (ValueError, KeyError):
            raise BadValue(f"'{text[:50]}' is not valid; it must be: {self.kind_text.removesuffix(', repeatable')}.") from None
        if self.least is not None and not value >= self.least:
            raise BadValue(f"{value} is too low; it must be at least {self.least:g}.")
        return value


def _path(text: str) -> Path:
    # Of an empty text, Path would make the current folder.
    if not text:
        raise BadValue("it is empty; it must be a path.")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise BadValue(f"{text}: there is no such user.") from error


def settings_of(slice_: Slice) -> tuple[Setting, ...]:
    """The settings of a slice, in the order of its fields, or of `names` where it names some."""
    hints, docs = get_type_hints(slice_.type), field_docs(slice_.type.__module__, slice_.type.__name__)
    fields = {field.name: field for field in dataclasses.fields(slice_.type) if not field.metadata.get("hidden")}
    return tuple(_setting(slice_, fields[name], hints[name], docs[name]) for name in slice_.names or fields)


def _setting(slice_: Slice, source: dataclasses.Field[Any], hint: Any, doc: str) -> Setting:
    kind = _without_none(hint)
    many = get_origin(kind) is tuple
    default = slice_.defaults.get(source.name, source.default)
    assert default is not dataclasses.MISSING, f"{slice_.type.__name__}.{source.name} needs a default to be a setting"
    return Setting(
        source.name,
        get_args(kind)[0] if many else kind,
        doc,
        default,
        heading=slice_.heading,
        many=many,
        positional=source.name == slice_.positional,
    )


_SIZE = re.compile(r"(-?\d+)|(\d+(?:\.\d+)?) ?([KMGT])(i?B)?|(\d+) ?B", re.IGNORECASE | re.ASCII)


def parse_size(text: str) -> int:
    """Bytes for `1048576`, `500MB`, `1.5GiB` or `2G`. KB is 1000 bytes; KiB and K alone are 1024.

    Raises BadValue for anything else.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise BadValue(f"'{text[:50]}' is not a number of bytes; write it as 500000000, 500MB (1000s), 1GiB or 1G (1024s).")
    plain, number, prefix, unit, bare = match.groups()
    if prefix is None:
        return int(plain or bare)
    base = 1000 if unit is not None and unit.lower() == "b" else 1024
    return int(Fraction(number) * base ** ("kmgt".index(prefix.lower()) + 1))


def _without_none(hint: Any) -> Any:
    """`int` for `int | None`."""
    if get_origin(hint) in (Union, types.UnionType):
        (kind,) = (part for part in get_args(hint) if part is not types.NoneType)
        return kind
    return hint


@functools.cache
def field_docs(module: str, class_name: str) -> dict[str, str]:
    """Field name -> the docstring under it, which Python itself throws away: read from the source."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    docs = {}
    for target, doc in itertools.pairwise(body):
        if isinstance(target, ast.AnnAssign) and isinstance(target.target, ast.Name) and isinstance(doc, ast.Expr):
            docs[target.target.id] = " ".join(str(ast.literal_eval(doc.value)).split())
    return docs
