"""The file given with --config: the names of the command line, checked types, nothing unknown passed over."""

from __future__ import annotations

from pathlib import Path

import pytest

from kveik.cli.config_file import read_config_file
from kveik.cli.options import every_setting
from kveik.errors import BadValue, Unreachable


def read(tmp_path: Path, text: str) -> dict[str, object]:
    path = tmp_path / "kveik.toml"
    path.write_text(text, encoding="utf-8")
    return read_config_file(path, every_setting())


def test_names_may_have_dashes_or_underscores(tmp_path: Path) -> None:
    assert read(tmp_path, "max-model-len = 512\nblock_size = 32\n") == {"max_model_len": 512, "block_size": 32}


def test_every_kind_of_value_is_read(tmp_path: Path) -> None:
    text = 'model = "a"\ngpu-memory-utilization = 1\nenable-prefix-caching = false\napi-key = ["x", "y"]\nstop = "end"\n'
    assert read(tmp_path, text) == {
        "model": "a",
        "gpu_memory_utilization": 1.0,
        "enable_prefix_caching": False,
        "api_key": ("x", "y"),
        "stop": ("end",),
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("blocksize = 8", "sets 'blocksize', which kveik does not know. Did you mean block-size?"),
        ("zzz = 8", "which kveik does not know. The names are those of the command line"),
        ("[cache]\nblock-size = 8", "sets 'cache', which kveik does not know"),
        ('block-size = "8"', "sets block-size to '8'; it must be: integer."),
        ("block-size = true", "sets block-size to True; it must be: integer."),
        ("max-model-len = 8.0", "sets max-model-len to 8.0; it must be: integer."),
        ("enable-prefix-caching = 1", "it must be: switch."),
        ('dtype = "float16"', "sets dtype to 'float16'; it must be one of auto, bfloat16, float32."),
        ("dtype = 16", "it must be one of auto, bfloat16, float32."),
        ("api-key = [1]", "it must be: text, repeatable."),
        ("port = 1\nport = 2", "is not valid TOML"),
        ("max-model-len = 1\nmax_model_len = 2", "twice, with dashes and with underscores"),
        ("port 8000", "is not valid TOML"),
    ],
)
def test_what_is_wrong_is_said_with_the_name(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(BadValue) as refused:
        read(tmp_path, text)
    assert words in refused.value.message


def test_bytes_that_are_no_text_are_no_toml(tmp_path: Path) -> None:
    path = tmp_path / "kveik.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(BadValue, match=r"is not UTF-8: .* at byte \d+\.$"):
        read_config_file(path, every_setting())


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match="cannot be read: No such file or directory"):
        read_config_file(tmp_path / "none.toml", every_setting())
