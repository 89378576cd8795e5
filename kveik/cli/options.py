"""Command-line options made from the configuration dataclasses: names, types, defaults and help all come from the fields.

One source for three readers: `--help`, the file given with `--config`, and docs/CONFIGURATION.md. A setting's value is the
command line's, else the file's, else the field's default.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from kveik.cli.config_file import read_config_file
from kveik.cli.setting import Drawn, Setting, Slice, parse_size, settings_of
from kveik.config import CacheConfig, EngineConfig, ModelConfig, ScheduleConfig, ServerConfig, StreamConfig
from kveik.errors import BadValue
from kveik.request.request import SamplingParams

T = TypeVar("T")

MODEL = Slice(ModelConfig, "Model")
CACHE = Slice(CacheConfig, "Cache")
SCHEDULE = Slice(ScheduleConfig, "Scheduling")
STREAM = Slice(StreamConfig, "Streams")
SERVER = Slice(ServerConfig, "Server")
ENGINE = (MODEL, CACHE, SCHEDULE, STREAM)

# `seed` is missing on purpose: --seed is the engine's, from which every request gets its own.
SAMPLING = Slice(
    SamplingParams,
    "Sampling",
    names=(
        *("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
        *("frequency_penalty", "n", "stop", "min_tokens", "ignore_eos", "logprobs"),
    ),
    # Small models drawn from the whole of their distribution write nonsense, so that is not what one sees first. A server
    # leaves both to its requests, whose defaults are OpenAI's.
    defaults={"max_tokens": 256, "temperature": 0.7, "top_p": 0.95},
)

EVERY_SLICE = (MODEL, CACHE, SCHEDULE, STREAM, SERVER, SAMPLING)


def every_setting() -> dict[str, Setting]:
    """Every setting of every command, by name."""
    return {setting.name: setting for slice_ in EVERY_SLICE for setting in settings_of(slice_)}


class Settings:
    """What the command line and the file gave, cut into the slices that a command takes."""

    def __init__(self, slices: tuple[Slice, ...], given: Mapping[str, object]) -> None:
        self._slices = {slice_.type: self._build(slice_, given) for slice_ in slices}

    @staticmethod
    def _build(slice_: Slice, given: Mapping[str, object]) -> object:
        settings = settings_of(slice_)
        defaults = {one.name: one.default.draw() if isinstance(one.default, Drawn) else one.default for one in settings}
        return slice_.type(**{name: given.get(name, default) for name, default in defaults.items()})

    def of(self, type_: type[T]) -> T:
        """One slice, by its dataclass."""
        slice_ = self._slices[type_]
        assert isinstance(slice_, type_)
        return slice_

    @property
    def engine(self) -> EngineConfig:
        """The slices that an engine needs, together."""
        return EngineConfig(
            model=self.of(ModelConfig),
            cache=self.of(CacheConfig),
            schedule=self.of(ScheduleConfig),
            stream=self.of(StreamConfig),
        )


def takes(*slices: Slice) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of these slices and --config, and hand it their values as its first argument, `Settings`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        settings = [setting for slice_ in slices for setting in settings_of(slice_)]

        def run(config: Path | None, **given: Any) -> None:
            typed = {setting.name: given.pop(setting.name) for setting in settings}
            try:
                values = _merged(typed, read_config_file(config, every_setting()) if config else {})
                configured = Settings(slices, values)
            except BadValue as error:
                raise typer.BadParameter(error.message) from error
            command(configured, **given)

        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
        # Built by hand, since typer reads a command's options from its signature.
        parameters = [*own, _CONFIG, *map(_parameter, settings)]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # functions have it; typeshed does not say so
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def _merged(typed: Mapping[str, object], filed: Mapping[str, object]) -> dict[str, object]:
    """The command line over the file. What was not typed came as None."""
    named = {name: tuple(value) if isinstance(value, list) else value for name, value in typed.items() if value is not None}
    return {**filed, **named}


def _parameter(setting: Setting) -> inspect.Parameter:
    return inspect.Parameter(
        setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(setting, _option(setting))
    )


def _annotation(setting: Setting, option: Any) -> Any:
    kind = list[setting.kind] if setting.many else setting.kind  # type: ignore[name-defined]  # the type is known at run time only
    return Annotated[kind | None, option]


def _option(setting: Setting) -> Any:
    help_ = setting.help if setting.default_text is None else f"{setting.help} [default: {setting.default_text}]"
    if setting.slice is MODEL and setting.name == "model":
        return typer.Argument(help=help_, show_default=False, metavar="MODEL")
    if setting.in_bytes:
        help_ = f"{help_} Units: 500MB (1000s), 1GiB or 1G (1024s)."
        return typer.Option(
            setting.flags,
            help=help_,
            show_default=False,
            rich_help_panel=setting.slice.heading,
            parser=_typed_size,
            metavar="BYTES",
        )
    return typer.Option(setting.flags, help=help_, show_default=False, rich_help_panel=setting.slice.heading)


def _typed_size(text: str) -> int:
    try:
        return parse_size(text)
    except BadValue as error:
        raise typer.BadParameter(error.message) from error


_CONFIG = inspect.Parameter(
    "config",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        Path | None,
        typer.Option(help="TOML file with settings, named as here without the dashes in front; what is typed goes first."),
    ],
)
