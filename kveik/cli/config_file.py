"""The file given with --config: TOML, one setting per line, named as on the command line, with dashes or underscores.

A file may hold settings of several commands, so that `serve` and `chat` can share it; a name that no command knows is refused.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args, get_origin

from kveik.cli.setting import Setting, parse_size
from kveik.errors import BadValue, Unreachable


def read_config_file(path: Path, known: Mapping[str, Setting]) -> dict[str, object]:
    """Setting name -> value, checked against the setting's type. `known`: every setting of every command, by name."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Unreachable(f"The configuration file {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise BadValue(f"The configuration file {path} is not UTF-8: {error.reason} at byte {error.start}.") from error
    except tomllib.TOMLDecodeError as error:
        raise BadValue(f"The configuration file {path} is not valid TOML: {error}.") from error
    values: dict[str, object] = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if name not in known:
            raise BadValue(f"{path} sets '{key}', which kveik does not know.{_nearest(name, known)}", param=name)
        if name in values:
            raise BadValue(f"{path} sets '{key}' twice, with dashes and with underscores.", param=name)
        values[name] = _checked(known[name], value, f"{path} sets {key} to")
    return values


def _nearest(name: str, known: Mapping[str, Setting]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {near[0].replace('_', '-')}?" if near else " The names are those of the command line, without --."


def _checked(setting: Setting, value: object, source: str) -> object:
    if not setting.many:
        return _checked_one(setting, value, source)
    values = value if isinstance(value, list) else [value]
    return tuple(_checked_one(setting, one, source) for one in values)


def _checked_one(setting: Setting, value: object, source: str) -> object:
    """One value of the setting's type. TOML knows types, so "8" is not a number here and true is not 1."""
    kind = setting.kind
    if get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
        raise BadValue(f"{source} {value!r}; it must be one of {', '.join(get_args(kind))}.", param=setting.name)
    if kind is float and type(value) is int:
        return float(value)
    if setting.in_bytes and isinstance(value, str):
        try:
            return parse_size(value)
        except BadValue as error:
            raise BadValue(f"{source} a bad size: {error.message}", param=setting.name) from error
    if type(value) is not kind:
        raise BadValue(f"{source} {value!r}; it must be: {setting.kind_text}.", param=setting.name)
    return value
