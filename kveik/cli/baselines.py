"""Baselines of `kveik evaluate`, each from one word: a preset, or settings as name=value."""

from __future__ import annotations

import contextlib
import difflib
from dataclasses import fields, replace
from typing import Any

from kveik.cli.options import ENGINE
from kveik.cli.setting import Setting, settings_of
from kveik.config import EngineConfig
from kveik.errors import BadValue

PRESETS: dict[str, dict[str, object]] = {
    "bf16": {"dtype": "bfloat16", "quantization": "bf16", "kv_cache_dtype": "auto"},
    "file": {"dtype": "float32", "quantization": "bf16", "kv_cache_dtype": "auto"},
}
"""Baselines by name. Both multiply with the file's weights, dequantised where its blocks are quantised, and quantise nothing
themselves: bf16 rounds weights, activations, keys and values to bfloat16, and file keeps all in float32."""

SETTINGS = {setting.name: setting for slice_ in ENGINE for setting in settings_of(slice_)}


def baseline_of(config: EngineConfig, against: str) -> EngineConfig:
    """`config` with what `against` says in its place: `bf16`, `file`, `name=value,...`, or one of the two and then settings.

    Raises BadValue for names that are no settings of an engine, and for values that they cannot have.
    """
    values: dict[str, object] = {}
    for part in filter(None, map(str.strip, against.split(","))):
        name, equals, text = part.partition("=")
        values.update({_known(name).name: _value(_known(name), text)} if equals else _preset(name))
    if not values:
        raise BadValue(f"--against is empty; it is {_FORMS}.", param="against")
    return replace(config, **{slice_.name: _changed(getattr(config, slice_.name), values) for slice_ in fields(config)})


_FORMS = f"{', '.join(PRESETS)}, or settings as name=value, for example quantization=w8a8,kv-cache-dtype=int8"


def _preset(name: str) -> dict[str, object]:
    if name not in PRESETS:
        raise BadValue(f"--against knows no '{name[:50]}'; it is {_FORMS}.", param="against")
    return PRESETS[name]


def _known(name: str) -> Setting:
    name = name.strip().removeprefix("--").replace("-", "_")
    if name not in SETTINGS:
        near = difflib.get_close_matches(name, SETTINGS, n=1)
        hint = f" Did you mean {near[0].replace('_', '-')}?" if near else ""
        raise BadValue(f"--against sets '{name[:50]}', which is not a setting of an engine.{hint}", param="against")
    return SETTINGS[name]


def _value(setting: Setting, text: str) -> object:
    """The value that the text stands for."""
    text = text.strip()
    with contextlib.suppress(BadValue):
        if text:
            return setting.parse(text)
    raise BadValue(f"--against sets {setting.flag[2:]} to '{text[:50]}'; it must be: {setting.kind_text}.", param="against")


def _changed(slice_: Any, values: dict[str, object]) -> Any:
    """The same slice with those of the values that are its own."""
    own = {field.name for field in fields(slice_)}
    return replace(slice_, **{name: value for name, value in values.items() if name in own})
