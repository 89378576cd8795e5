"""An engine or a server that is killed at any moment: what the next one finds in the folder is right, or it finds nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from kveik.cli.cache import verify
from tests.bad_days.doomed import Life, Verdict, kill
from tests.bad_days.server import Server
from tests.bad_days.traffic import Asked, conversations
from tests.engine.tiny import save_tiny_gemma, save_tiny_llama

CAPACITY = 2 << 20
SERVERS_CAPACITY = 8 * CAPACITY
EACH_POLICY = pytest.mark.parametrize("policy", ["write-through", "filtered"])
Known = tuple[str, list[Asked]]


@pytest.fixture(scope="module", params=[save_tiny_llama, save_tiny_gemma], ids=["llama", "gemma"])
def known(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Known:
    save: Callable[[Path], Path] = request.param
    model = str(save(tmp_path_factory.mktemp("tiny")))
    return model, conversations(model)


def on_the_disk(folder: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in (folder / "kveik-kv").iterdir())


def check_left(folder: Path, capacity_bytes: int) -> None:
    """What a killed one has left is within its bound, and, as the command tells, every record that the index names is sound."""
    assert on_the_disk(folder) <= capacity_bytes
    assert verify(folder, forget=False) == 0


def kill_again_and_again(known: Known, folder: Path, policy: str, seeds: range) -> list[Verdict]:
    """Engine after engine on one folder; the verdicts of those that came so far."""
    verdicts: list[Verdict] = []
    for seed in seeds:
        life = Life(known[0], folder, CAPACITY, policy, known[1], seed)
        verdict = kill(life, random.Random(f"end {seed}"))
        if verdict is not None:
            assert verdict.failure is None, f"seed {seed}: {verdict.failure}"
            verdicts.append(verdict)
        # One that was killed at once has begun nothing.
        if (folder / "kveik-kv" / "index").exists():
            check_left(folder, CAPACITY)
        assert not (folder / "kveik-kv" / "index.damaged").exists()
    return verdicts


def test_an_engine_killed_at_any_moment_leaves_what_the_next_one_serves_rightly(known: Known, tmp_path: Path) -> None:
    verdicts = kill_again_and_again(known, tmp_path / "kv", "write-through", range(3))
    assert sum(one.records_loaded for one in verdicts[1:]) > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@EACH_POLICY
def test_engines_killed_fifty_times_each_leave_what_the_next_one_serves_rightly(
    known: Known, policy: str, tmp_path: Path
) -> None:
    verdicts = kill_again_and_again(known, tmp_path / "kv", policy, range(1000, 1050))
    assert len(verdicts) > 25
    assert sum(one.records_loaded > 0 for one in verdicts) > len(verdicts) // 2


@pytest.fixture(scope="module")
def slower(tmp_path_factory: pytest.TempPathFactory) -> Known:
    """A model that takes long enough for a server to find out that loading pays."""
    model = str(save_tiny_llama(tmp_path_factory.mktemp("slower"), width=256, layers=4))
    return model, conversations(model, count=6)


def kill_servers(known: Known, folder: Path, policy: str, seeds: range) -> list[float]:
    """Server after server: judged by what it answers, and killed under load. Prompt tokens that each loaded from the disk."""
    options = ["--kv-disk", str(folder / "kv"), "--kv-disk-bytes", str(SERVERS_CAPACITY), "--num-gpu-blocks-override", "48"]
    options += ["--kv-ram-bytes", str(1 << 20), "--kv-ram-encoding", "raw", "--kv-write-policy", policy]
    model, asked = known
    loaded: list[float] = []
    for seed in seeds:
        server = Server(model, folder / "home", *options)
        try:
            cached = server.ask_all(asked)
            source = server.prompt_tokens()
            assert sum(source.values()) == sum(len(one.prompt) for one in asked)
            assert sum(source.values()) - source["computed"] == cached
            loaded.append(source["disk"])
            server.killed_under_load(asked, random.Random(f"server {seed}"))
        finally:
            server.kill()
        check_left(folder / "kv", SERVERS_CAPACITY)
    return loaded


def test_a_server_killed_under_load_leaves_what_the_next_one_serves_rightly(slower: Known, tmp_path: Path) -> None:
    loaded = kill_servers(slower, tmp_path, "write-through", range(2))
    assert loaded[1] > loaded[0]


@pytest.mark.slow
@pytest.mark.timeout(900)
@EACH_POLICY
def test_servers_killed_again_and_again_leave_what_the_next_one_serves_rightly(
    slower: Known, policy: str, tmp_path: Path
) -> None:
    loaded = kill_servers(slower, tmp_path, policy, range(10, 20))
    assert sum(one > 0 for one in loaded[1:]) > 5


@pytest.mark.slow
def test_a_second_server_on_the_folder_ends_and_says_who_has_it(slower: Known, tmp_path: Path) -> None:
    options = ["--kv-disk", str(tmp_path / "kv"), "--kv-disk-bytes", str(SERVERS_CAPACITY)]
    first = Server(slower[0], tmp_path / "one", *options)
    try:
        with pytest.raises(AssertionError, match=rf"in use by another engine \(process {first.process.pid}\)"):
            Server(slower[0], tmp_path / "two", *options)
        first.ask_all(slower[1][:4])
    finally:
        first.kill()
