"""`kveik plan` says of the tiers below the pool what the start says, and refuses what the start refuses; it opens nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from kveik.cli.main import run
from kveik.config import CacheConfig, EngineConfig, ModelConfig, ScheduleConfig
from kveik.engine.llm import LLM
from tests.engine.tiny import save_tiny_gemma

CONTEXT = ("--max-model-len", "256", "--max-num-seqs", "4", "--prefill-chunk-size", "128")
POOL = ("--kv-cache-memory-bytes", "16MB")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of two layer groups."""
    return str(save_tiny_gemma(tmp_path_factory.mktemp("tiny")))


def lines_at_start(model: str, **cache: object) -> list[str]:
    lines: list[str] = []
    config = EngineConfig(
        model=ModelConfig(model=model, max_model_len=256),
        cache=CacheConfig(kv_cache_memory_bytes=16_000_000, **cache),  # type: ignore[arg-type]  # a test's own words
        schedule=ScheduleConfig(max_num_seqs=4, prefill_chunk_size=128),
    )
    LLM(config, lines.append).close()
    return [line for line in lines if line.startswith("tier ")]


SETTINGS: dict[str, dict[str, object]] = {
    "ram": {"kv_ram_bytes": 1 << 24},
    "raw": {"kv_ram_bytes": 1 << 24, "kv_ram_encoding": "raw"},
    "fraction": {"hybrid_kv_cache_fraction": 0.25},
    "disk": {"kv_disk_bytes": 1 << 27},
    "both, quantised": {"kv_ram_bytes": 1 << 22, "kv_disk_bytes": 1 << 27, "kv_cache_dtype": "int8", "block_size": 32},
    "remote": {"kv_ram_bytes": 1 << 22, "kv_remote": "redis://127.0.0.1:1/0", "kv_remote_bytes": 1 << 23},
}


@pytest.mark.parametrize("cache", SETTINGS.values(), ids=list(SETTINGS))
def test_tiers_are_planned_in_the_words_of_the_start(
    model: str, cache: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "kv"
    if "kv_disk_bytes" in cache:
        cache = {**cache, "kv_disk": str(folder)}
    options = [word for name, value in cache.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert run(["plan", model, *CONTEXT, *POOL, *options]) == 0
    planned = [line for line in capsys.readouterr().out.splitlines() if line.startswith("tier ")]
    assert not folder.exists()
    assert planned == lines_at_start(model, **cache)
    assert len(planned) == sum(name in cache for name in ("kv_ram_bytes", "hybrid_kv_cache_fraction", "kv_disk", "kv_remote"))


def test_without_tiers_nothing_is_said_of_them(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", model, *CONTEXT, *POOL]) == 0
    assert "tier" not in capsys.readouterr().out


def test_a_folder_in_use_is_planned_for_and_left_as_it_is(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--kv-disk", str(tmp_path / "kv"), "--kv-disk-bytes", "64MB"]
    cache = CacheConfig(kv_cache_memory_bytes=16_000_000, kv_disk=options[1], kv_disk_bytes=64_000_000)
    llm = LLM(EngineConfig(model=ModelConfig(model=model, max_model_len=256), cache=cache))
    before = {file.name: (file.stat().st_mtime_ns, file.read_bytes()) for file in (tmp_path / "kv" / "kveik-kv").iterdir()}
    assert run(["plan", model, *CONTEXT, *POOL, *options]) == 0
    assert "tier disk: at most 61.0 MiB" in capsys.readouterr().out
    assert {
        file.name: (file.stat().st_mtime_ns, file.read_bytes()) for file in (tmp_path / "kv" / "kveik-kv").iterdir()
    } == before
    llm.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--kv-disk", "{}/file"], "cannot be made: Not a directory"),
        (["--kv-disk", "{}/file/kv"], "cannot be made: Not a directory"),
        (["--kv-disk", "{}/theirs"], "cannot be used: it is a file, not a folder"),
        (["--kv-disk", "{}/new", "--kv-disk-bytes", "10000"], "--kv-disk-bytes 10000 is too little"),
        (["--kv-ram-bytes", "100"], "--kv-ram-bytes is 100"),
        (["--hybrid-kv-cache-fraction", "1e-9"], "--hybrid-kv-cache-fraction is 1e-09"),
        (["--kv-remote", "nowhere"], "--kv-remote"),
        (["--kv-remote", "redis://127.0.0.1:1/0", "--kv-remote-bytes", "1"], "--kv-remote-bytes is 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_what_a_start_refuses_of_tiers_a_plan_refuses_in_the_same_words(
    model: str, options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "kveik-kv").write_text("mine")
    before = sorted(path for path in tmp_path.rglob("*"))
    line = [model, *CONTEXT, *POOL, *(option.format(tmp_path) for option in options)]
    assert run(["plan", *line]) == 1
    planned = capsys.readouterr().err
    assert words in " ".join(planned.split())
    assert sorted(path for path in tmp_path.rglob("*")) == before
    assert run(["generate", "-p", "x", *line]) == 1
    assert planned.splitlines()[0] in capsys.readouterr().err
