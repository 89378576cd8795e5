"""From a typed line and a file to configuration slices: the line goes first, then the file, then the default."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from kveik.cli.command import Command, WrongLine
from kveik.cli.options import CHAT_STREAM, ENGINE, SAMPLING, SERVER, Settings
from kveik.cli.setting import Drawn, Slice, settings_of
from kveik.config import EngineConfig, ServerConfig, StreamConfig
from kveik.request.request import SamplingParams

EVERYTHING = Command("A command.", "nowhere:run", slices=(*ENGINE, SERVER, SAMPLING))


def settings_from(*words: str, command: Command = EVERYTHING) -> Settings:
    """What a command with every slice gets for this line."""
    read = command.read(words)
    assert read is not None
    return read[0]


def refusal_of(*words: str) -> str:
    with pytest.raises(WrongLine) as refused:
        settings_from(*words)
    return str(refused.value)


def test_nothing_typed_gives_the_defaults_of_the_dataclasses() -> None:
    settings = settings_from()
    assert settings.engine == EngineConfig()
    assert settings.of(ServerConfig) == ServerConfig()
    assert settings.of(SamplingParams) == SamplingParams(max_tokens=256, temperature=0.7, top_p=0.95)


def test_a_default_that_is_drawn_differs_from_start_to_start_and_a_given_value_does_not() -> None:
    numbers = itertools.count(5)
    drawn = Slice(StreamConfig, "Streams", defaults={"seed": Drawn(lambda: next(numbers), "counted")})
    assert [Settings((drawn,), {}).of(StreamConfig).seed for _ in range(2)] == [5, 6]
    assert Settings((drawn,), {"seed": 3}).of(StreamConfig).seed == 3
    assert {setting.name: setting.default_text for setting in settings_of(drawn)}["seed"] == "counted"


def test_two_chats_are_not_alike_unless_a_seed_is_given() -> None:
    seeds = {Settings((CHAT_STREAM,), {}).of(StreamConfig).seed for _ in range(8)}
    assert len(seeds) > 1


def test_what_is_typed_reaches_its_slice() -> None:
    settings = settings_from(
        *("my-model", "--block-size", "32", "--no-enable-prefix-caching", "--gpu-memory-utilization", "0.5"),
        *("--api-key", "a", "--api-key", "b", "--scheduling-policy", "priority", "--stop", "x", "--temperature", "0"),
    )
    assert settings.engine.model.model == "my-model"
    assert settings.engine.cache.block_size == 32
    assert settings.engine.cache.enable_prefix_caching is False
    assert settings.engine.cache.gpu_memory_utilization == 0.5
    assert settings.engine.schedule.scheduling_policy == "priority"
    assert settings.of(ServerConfig).api_key == ("a", "b")
    assert settings.of(SamplingParams).stop == ("x",)
    assert settings.of(SamplingParams).greedy


def test_the_line_goes_before_the_file_and_the_file_before_the_default(tmp_path: Path) -> None:
    file = tmp_path / "kveik.toml"
    file.write_text('model = "filed"\nblock-size = 32\nmax-num-seqs = 3\nenable-prefix-caching = false\n')
    settings = settings_from("--config", str(file), "--block-size", "64", "--enable-prefix-caching")
    assert settings.engine.model.model == "filed"
    assert settings.engine.cache.block_size == 64
    assert settings.engine.cache.enable_prefix_caching is True
    assert settings.engine.schedule.max_num_seqs == 3


def test_a_file_may_hold_settings_of_other_commands(tmp_path: Path) -> None:
    file = tmp_path / "kveik.toml"
    file.write_text("port = 9\nblock-size = 8\n")
    engine = Command("A command.", "nowhere:run", slices=ENGINE)
    assert settings_from("--config", str(file), command=engine).engine.cache.block_size == 8


@pytest.mark.parametrize(
    "words",
    [("--port", "9", "my-model"), ("my-model", "--port", "9"), ("--port=9", "--", "my-model"), ("--port=9", "my-model")],
)
def test_the_model_may_stand_anywhere_on_the_line(words: tuple[str, ...]) -> None:
    settings = settings_from(*words)
    assert (settings.engine.model.model, settings.of(ServerConfig).port) == ("my-model", 9)


def test_a_value_may_be_a_negative_number() -> None:
    assert settings_from("--seed", "-5").of(StreamConfig).seed == -5


def test_an_option_with_a_slip_is_told_with_the_nearest() -> None:
    assert refusal_of("--blok-size", "8") == "There is no option --blok-size. Did you mean --block-size?"


def test_a_value_out_of_range_is_a_usage_error_with_number_and_flag() -> None:
    assert "--block-size is 12; it must be one of 8, 16, 32, 64." in refusal_of("--block-size", "12")
    assert '--device is "cuda"; this version computes on the CPU alone.' in refusal_of("--device", "cuda")
    assert "--max-num-seqs is 9, more than --max-num-batched-tokens 8" in refusal_of(
        "--max-num-seqs", "9", "--max-num-batched-tokens", "8"
    )
    assert "temperature is -1.0" in refusal_of("--temperature", "-1")


def test_a_value_of_another_kind_is_a_usage_error() -> None:
    assert "'--block-size'" in refusal_of("--block-size", "many")
    assert "bfloat16" in refusal_of("--dtype", "float16")


@pytest.mark.parametrize(
    ("name", "value", "wants"),
    [
        ("kv-ram-encoding", "auto", "--kv-ram-bytes"),
        ("kv-write-policy", "filtered", "--kv-disk"),
        ("kv-disk-bytes", "1GB", "--kv-disk"),
        ("kv-remote-bytes", "1GB", "--kv-remote"),
    ],
)
def test_a_tier_setting_without_its_tier_is_a_usage_error_on_the_line_and_in_the_file(
    name: str, value: str, wants: str, tmp_path: Path
) -> None:
    file = tmp_path / "kveik.toml"
    file.write_text(f'{name} = "{value}"\n')
    for words in ((f"--{name}", value), ("--config", str(file))):
        told = refusal_of(*words)
        assert f"--{name} is " in told
        assert f"no effect without {wants}" in told or f" {wants} or " in told


def test_a_bad_file_is_a_usage_error(tmp_path: Path) -> None:
    file = tmp_path / "kveik.toml"
    file.write_text("blocksize = 8")
    assert "Did you mean block-size?" in refusal_of("--config", str(file))


@pytest.mark.parametrize(
    ("typed", "count"),
    [
        *(("60000000", 60_000_000), ("500MB", 500_000_000), ("500 mb", 500_000_000), ("1GiB", 1 << 30), ("2G", 2 << 30)),
        *(("1.5g", 3 << 29), ("64K", 64 << 10), ("1KB", 1000), ("1TiB", 1 << 40), ("4096B", 4096)),
    ],
)
def test_bytes_may_have_a_unit_on_the_line_and_in_the_file(typed: str, count: int, tmp_path: Path) -> None:
    assert settings_from("--kv-cache-memory-bytes", typed).engine.cache.kv_cache_memory_bytes == count
    file = tmp_path / "kveik.toml"
    file.write_text(f'kv-cache-memory-bytes = "{typed}"\nmax-body-bytes = "1MiB"\n')
    settings = settings_from("--config", str(file))
    assert settings.engine.cache.kv_cache_memory_bytes == count
    assert settings.of(ServerConfig).max_body_bytes == 1 << 20


@pytest.mark.parametrize("typed", ["", "G", "1XB", "1.5", "1 000", "0x10", "-1GiB", "1e9", "1GiBit", "٣G"])
def test_bytes_that_are_none_are_a_usage_error_that_shows_how(typed: str, tmp_path: Path) -> None:
    assert "is not a number of bytes; write it as" in refusal_of("--max-body-bytes", typed)
    file = tmp_path / "kveik.toml"
    file.write_text(f'max-body-bytes = "{typed}"\n', encoding="utf-8")
    assert "sets max-body-bytes to a bad size" in refusal_of("--config", str(file))


def test_a_negative_number_of_bytes_is_out_of_range() -> None:
    assert "--kv-cache-memory-bytes is -5; it must be at least 1." in refusal_of("--kv-cache-memory-bytes", "-5")


def test_help_names_every_flag_in_full_under_its_heading() -> None:
    help_ = EVERYTHING.help("kveik any")
    for words in ("--long-prefill-token-threshold", "--no-enable-prefix-caching", "[default: 16]", "in (0, 1]."):
        assert words in help_
    assert [help_.index(f"\n{heading}:") for heading in ("Model", "Cache", "Scheduling", "Streams", "Server")] == sorted(
        help_.index(f"\n{heading}:") for heading in ("Model", "Cache", "Scheduling", "Streams", "Server")
    )
