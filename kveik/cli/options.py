"""Settings of the command line, made from the configuration dataclasses: names, types, defaults and help come from the fields.

One source for three readers: `--help`, the file given with `--config`, and docs/CONFIGURATION.md. A setting's value is the
command line's, else the file's, else the field's default.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import TypeVar

from kveik.cli.setting import Drawn, Setting, Slice, settings_of
from kveik.config import CacheConfig, EngineConfig, ModelConfig, ScheduleConfig, ServerConfig, StreamConfig
from kveik.request.request import SamplingParams

T = TypeVar("T")

MODEL = Slice(ModelConfig, "Model", positional="model")
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
CHAT_SAMPLING = Slice(
    SamplingParams,
    SAMPLING.heading,
    names=tuple(name for name in SAMPLING.names or () if name not in ("n", "logprobs")),
    defaults={**SAMPLING.defaults, "max_tokens": 1024},
)
CHAT_STREAM = Slice(
    StreamConfig, STREAM.heading, defaults={"seed": Drawn(lambda: secrets.randbits(31), "another one at every start")}
)

EVERY_SLICE = (MODEL, CACHE, SCHEDULE, STREAM, SERVER, SAMPLING)


def every_setting() -> dict[str, Setting]:
    """Every setting of every command, by name."""
    return {setting.name: setting for slice_ in EVERY_SLICE for setting in settings_of(slice_)}


class Settings:
    """The values of the command line and the file, cut into the slices that a command takes."""

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
