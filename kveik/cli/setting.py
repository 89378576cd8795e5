"""One setting as the outside sees it: a field of a configuration dataclass with its name, type, default and help."""

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
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from kveik.errors import BadValue


@dataclass(frozen=True, slots=True)
class Drawn:
    """A default that is another one at every start."""

    draw: Callable[[], object]
    text: str
    """What help says in its place."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A configuration dataclass, or some of its fields, as a group of settings with a heading."""

    type: type[Any]
    heading: str
    names: tuple[str, ...] | None = None
    """Fields to offer; None: all that are not hidden."""

    defaults: Mapping[str, object] = field(default_factory=dict)
    """Defaults for fields that have none of their own, or another one here; `Drawn` for one that changes."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One field, seen from outside."""

    name: str
    slice: Slice
    kind: Any
    """int, float, str, bool or a Literal of strings: what one value is."""

    many: bool
    """Whether it may be given several times."""

    default: object
    help: str

    @property
    def in_bytes(self) -> bool:
        """Whether it is a number of bytes, which may be given with a unit."""
        return self.name.endswith("_bytes")

    @property
    def flag(self) -> str:
        """`--max-model-len` for `max_model_len`."""
        return "--" + self.name.replace("_", "-")

    @property
    def flags(self) -> str:
        """As one types it: a switch has a name for either way."""
        return f"{self.flag}/--no-{self.flag[2:]}" if self.kind is bool else self.flag

    @property
    def default_text(self) -> str | None:
        """The default as one would type it; None where the help tells in words what happens without it."""
        if self.default is None or self.default == ():
            return None
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        if isinstance(self.default, Drawn):
            return self.default.text
        return str(self.default)

    @property
    def kind_text(self) -> str:
        """What a value looks like, for tables."""
        if get_origin(self.kind) is Literal:
            return " | ".join(get_args(self.kind))
        if self.in_bytes:
            return "bytes, as 500000000, 500MB or 1GiB"
        name = {int: "integer", float: "number", str: "text", bool: "switch"}[self.kind]
        return f"{name}, repeatable" if self.many else name


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
    return Setting(source.name, slice_, get_args(kind)[0] if many else kind, many, default, doc)


_SIZE = re.compile(r"(-?\d+)|(\d+(?:\.\d+)?) ?([KMGT])(i?B)?|(\d+) ?B", re.IGNORECASE | re.ASCII)


def parse_size(text: str) -> int:
    """Bytes for `1048576`, `500MB`, `1.5GiB` or `2G`. KB is 1000 bytes; KiB and K alone are 1024.

    Raises BadValue for anything else.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise BadValue(f"'{text[:50]}' is no number of bytes; write it as 500000000, 500MB (1000s), 1GiB or 1G (1024s).")
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
