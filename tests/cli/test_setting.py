"""Settings seen from outside: names, kinds, defaults and help come from the fields alone."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

import pytest

from kveik.cli.options import EVERY_SLICE, every_setting
from kveik.cli.setting import Setting, Slice, settings_of


@dataclass(frozen=True, kw_only=True)
class Brew:
    """How to brew."""

    warm_celsius: float = 37.5
    """Degrees of the wort,
    in Celsius."""

    yeast: Literal["kveik", "ale"] = "kveik"
    """Which yeast."""

    stir: bool = False
    """Whether to stir."""

    notes: tuple[str, ...] = ()
    """Remarks."""

    litres: int | None = None
    """Size. Default: what the pot holds."""

    secret: int = field(default=1, metadata={"hidden": True})
    """Not offered."""

    bottles: int = field(default=dataclasses.MISSING)  # type: ignore[assignment]  # a field without a default
    """How many bottles."""


def by_name(slice_: Slice) -> dict[str, Setting]:
    return {setting.name: setting for setting in settings_of(slice_)}


def test_a_field_becomes_a_setting_with_its_docstring_as_help() -> None:
    settings = by_name(Slice(Brew, "Brewing", defaults={"bottles": 24}))
    assert list(settings) == ["warm_celsius", "yeast", "stir", "notes", "litres", "bottles"]
    assert settings["warm_celsius"].help == "Degrees of the wort, in Celsius."
    assert settings["warm_celsius"].flags == ("--warm-celsius",)
    assert settings["stir"].flags == ("--stir", "--no-stir")
    assert (settings["notes"].kind, settings["notes"].many) == (str, True)
    assert settings["litres"].kind is int


def test_defaults_read_as_one_would_type_them() -> None:
    settings = by_name(Slice(Brew, "Brewing", defaults={"bottles": 24}))
    shown = {name: setting.default_text for name, setting in settings.items()}
    assert shown == {"warm_celsius": "37.5", "yeast": "kveik", "stir": "off", "notes": None, "litres": None, "bottles": "24"}


def test_a_slice_may_offer_some_fields_only() -> None:
    assert list(by_name(Slice(Brew, "Brewing", names=("stir", "yeast")))) == ["stir", "yeast"]


def test_a_field_without_a_default_must_get_one() -> None:
    with pytest.raises(AssertionError, match=r"Brew\.bottles needs a default"):
        settings_of(Slice(Brew, "Brewing"))


@pytest.mark.parametrize("setting", every_setting().values(), ids=every_setting())
def test_every_setting_explains_itself_in_a_sentence(setting: Setting) -> None:
    assert setting.help.rstrip().endswith("."), setting.name
    assert len(setting.help) >= 10


def test_no_two_slices_offer_the_same_name() -> None:
    names = [setting.name for slice_ in EVERY_SLICE for setting in settings_of(slice_)]
    assert len(set(names)) == len(names)
