"""The whole engine with tiers below its pool: what comes back from RAM or disk, also after a restart, is what was computed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kveik.clock import SystemClock
from kveik.config import CacheConfig, EngineConfig, ModelConfig, StreamConfig
from kveik.engine import build
from kveik.engine.cache_stats import reset_cache
from kveik.engine.llm import LLM
from kveik.engine.loop import EngineLoop
from kveik.errors import BadValue, KveikError, Unreachable, Unsupported
from kveik.observe.events import RequestAdmitted
from kveik.offload.stores import redis_wire as wire
from kveik.offload.stores.disk_offline import store_at
from kveik.offload.stores.record import Miss, RecordKey
from kveik.offload.stores.store import Direct, Use, verify
from kveik.request.request import Request, SamplingParams
from kveik.schedule.plan import StepPlan
from tests.engine.tiered import carrier, metric, mover, offload, opened, read
from tests.engine.tiny import save_tiny_gemma, save_tiny_llama
from tests.offload.stores.redis_server import running

LENGTH, CONVERSATIONS = 330, 5
"""All conversations together are more than the pool holds."""

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module", params=[save_tiny_llama, save_tiny_gemma], ids=["llama", "gemma"])
def model(request, tmp_path_factory) -> str:  # type: ignore[no-untyped-def]  # pytest's own fixtures
    save: Callable[[Path], Path] = request.param
    return str(save(tmp_path_factory.mktemp("tiny")))


def prompts() -> list[list[int]]:
    chance = random.Random(7)
    return [[number, *(chance.randrange(256) for _ in range(LENGTH - 1))] for number in range(CONVERSATIONS)]


Answers = list[tuple[tuple[int, ...], int]]


def turns_after(fresh: Answers) -> list[list[int]]:
    """Each conversation goes on: what layers with a window keep below is what this needs."""
    return [[*prompt, *tokens, 5, 6, 7] for prompt, (tokens, _) in zip(prompts(), fresh, strict=True)]


KEPT = (LENGTH + 12 - 1) // 16 * 16
"""Tokens of a conversation in whole blocks; the last token of an answer is never computed."""


def answers(llm: LLM, asked: Sequence[Sequence[int]]) -> Answers:
    """Tokens and cached prompt tokens of each, one after the other; what is to be written below is then."""
    found = []
    for prompt in asked:
        (completion,) = llm.generate([prompt], GREEDY)
        found.append((completion.tokens, completion.cached_tokens))
        mover(llm).drain(llm.loaded.engine.clock.now() + 3600)
        llm.loaded.engine.attend()
        llm.loaded.engine.scheduler.check()
    return found


def plainly(model: str, asked: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Without any cache."""
    llm = opened(model, enable_prefix_caching=False)
    found = [llm.generate([prompt], GREEDY)[0].tokens for prompt in asked]
    llm.close()
    return found


@pytest.mark.parametrize("tiers", ["ram", "disk", "both"])
def test_what_the_pool_gave_up_comes_back_exactly_and_goes_on_exactly(model: str, tiers: str, tmp_path: Path) -> None:
    cache: dict[str, object] = {}
    if tiers != "disk":
        # Beside a disk, RAM is so small that it has to hand things on.
        cache |= {"kv_ram_bytes": 1 << 20 if tiers == "both" else 1 << 24, "kv_ram_encoding": "raw"}
    if tiers != "ram":
        cache |= {"kv_disk": str(tmp_path / "disk"), "kv_disk_bytes": 1 << 26}
    llm = opened(model, **cache)
    fresh = answers(llm, prompts())
    assert all(cached == 0 for _, cached in fresh)
    again = answers(llm, prompts())
    assert [tokens for tokens, _ in again] == [tokens for tokens, _ in fresh]
    went_on = answers(llm, turns_after(fresh))
    assert [cached for _, cached in went_on] == [KEPT] * CONVERSATIONS
    assert sum(read(llm, one) for one in (("ram", "disk") if tiers == "both" else (tiers,))) > 0
    assert [tokens for tokens, _ in went_on] == plainly(model, turns_after(fresh))
    llm.close()


def test_what_is_worth_keeping_is_found_after_a_restart(model: str, tmp_path: Path) -> None:
    cache: dict[str, object] = {"kv_disk": str(tmp_path / "disk"), "kv_disk_bytes": 1 << 26}
    first = opened(model, **cache)
    fresh = answers(first, prompts())
    first.close()
    second = opened(model, **cache)
    again = answers(second, turns_after(fresh))
    assert [tokens for tokens, _ in again] == plainly(model, turns_after(fresh))
    assert [cached for _, cached in again] == [KEPT] * CONVERSATIONS
    second.close()


def test_every_prompt_token_is_counted_once_by_where_it_came_from(model: str, tmp_path: Path) -> None:
    llm = opened(model, kv_ram_bytes=1 << 20, kv_ram_encoding="raw", kv_disk=str(tmp_path / "disk"), kv_disk_bytes=1 << 26)
    admitted: list[RequestAdmitted] = []
    llm.loaded.bus.subscribe(lambda event: admitted.append(event) if isinstance(event, RequestAdmitted) else None)
    fresh = answers(llm, prompts())
    again = answers(llm, turns_after(fresh))
    loaded = {name: sum(one.loaded_tokens.get(name, 0) for one in admitted) for name in ("ram", "disk")}
    assert min(loaded.values()) > 0
    source = {name: metric(llm, "prompt_tokens_by_source_total", name) for name in ("computed", "cached", "ram", "disk")}
    assert {"ram": source["ram"], "disk": source["disk"]} == loaded
    assert source["cached"] + source["ram"] + source["disk"] == sum(cached for _, cached in again)
    assert sum(source.values()) == sum(map(len, prompts())) + sum(map(len, turns_after(fresh)))
    assert metric(llm, "kv_load_decisions_total", "load") >= sum(bool(one.loaded_tokens) for one in admitted)
    assert metric(llm, "kv_tier_bytes", "disk") <= metric(llm, "kv_tier_capacity_bytes", "disk") == 1 << 26
    assert metric(llm, "kv_tier_loads_total", "disk") == read(llm, "disk")
    llm.close()


def test_a_reset_forgets_what_is_below_as_well_and_gives_its_room_back(model: str, tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    llm = opened(model, kv_ram_bytes=1 << 20, kv_disk=str(folder), kv_disk_bytes=1 << 26, kv_write_policy="write-through")
    engine, (ram, disk) = llm.loaded.engine, carrier(llm).stores
    empty = disk.bytes_used
    answers(llm, prompts()[:3])
    assert ram.records > 0
    assert disk.bytes_used > 4 * empty
    reset_cache(engine)
    deadline = time.monotonic() + 5.0
    while engine.unsettled and time.monotonic() < deadline:
        engine.attend()
        time.sleep(0.01)
    assert ram.bytes_used == 0
    assert disk.bytes_used == sum(file.stat().st_blocks * 512 for file in (folder / "kveik-kv").iterdir()) <= empty
    again = answers(llm, prompts()[:2])
    assert [cached for _, cached in again] == [0, 0]
    llm.close()


def test_another_model_finds_nothing_in_the_folder(tmp_path: Path) -> None:
    cache: dict[str, object] = {"kv_disk": str(tmp_path / "disk"), "kv_disk_bytes": 1 << 26}
    first = opened(str(save_tiny_llama(tmp_path / "one")), **cache)
    answers(first, prompts())
    first.close()
    second = opened(str(save_tiny_llama(tmp_path / "two", seed=1)), **cache)
    assert [cached for _, cached in answers(second, prompts())] == [0] * CONVERSATIONS
    second.close()


def test_int8_records_are_found_as_well(model: str) -> None:
    llm = opened(model, kv_ram_bytes=1 << 24, kv_ram_encoding="int8")
    turns = turns_after(answers(llm, prompts()))
    assert [cached for _, cached in answers(llm, turns)] == [KEPT] * CONVERSATIONS
    assert read(llm, "ram") > 0
    llm.close()


def test_where_float32_was_asked_for_ram_stores_blocks_as_they_are_unless_told_otherwise(model: str) -> None:
    lines: list[str] = []
    opened(model, kv_ram_bytes=1 << 20, report=lines.append).close()
    opened(model, kv_ram_bytes=1 << 20, kv_ram_encoding="int8", report=lines.append).close()
    stored = [re.search(r"stored (?:as )?(\w+)", line) for line in lines if line.startswith("tier ram")]
    assert [one[1] for one in stored if one] == ["raw", "int8"]


def test_what_one_engine_computed_another_loads_from_the_server_that_they_share(model: str) -> None:
    with running() as server:
        first = opened(model, kv_remote=server.url, kv_write_policy="write-through")
        fresh = answers(first, prompts())
        second = opened(model, kv_remote=server.url)
        again = answers(second, turns_after(fresh))
        assert [tokens for tokens, _ in again] == plainly(model, turns_after(fresh))
        assert [cached for _, cached in again] == [KEPT] * CONVERSATIONS
        assert metric(second, "prompt_tokens_by_source_total", "remote") == KEPT * CONVERSATIONS
        first.close()
        second.close()


def test_a_server_that_is_frozen_or_dead_fails_nobody(model: str) -> None:
    with running() as server:
        llm = opened(model, seconds=1e-4, kv_remote=server.url, kv_write_policy="write-through")
        fresh = answers(llm, prompts())
        with server.frozen():
            again = [llm.generate([prompt], GREEDY)[0].tokens for prompt in turns_after(fresh)]
        server.kill()
        once_more = [llm.generate([prompt], GREEDY)[0].tokens for prompt in turns_after(fresh)]
        server.start()
        assert again == once_more == plainly(model, turns_after(fresh))
        llm.close()


def test_a_disk_that_does_not_answer_delays_nobody_beyond_recomputing(model: str, tmp_path: Path) -> None:
    llm = opened(model, seconds=1e-4, kv_disk=str(tmp_path / "disk"), kv_disk_bytes=1 << 26)
    fresh = answers(llm, prompts())
    disk, released = carrier(llm).stores[0], threading.Event()
    get_many = disk.get_many

    def stuck(keys: Sequence[RecordKey], use: Use, deadline: float, direct: Direct | None = None) -> list[Miss | None]:
        released.wait()
        return get_many(keys, use, deadline, direct)

    disk.get_many = stuck  # type: ignore[method-assign]  # a disk that hangs
    again = [llm.generate([prompt], GREEDY)[0] for prompt in turns_after(fresh)]
    # All have answered, and the disk has not.
    assert not released.is_set()
    assert read(llm, "disk") == 0
    assert [one.tokens for one in again] == plainly(model, turns_after(fresh))
    released.set()
    llm.close()


def test_a_server_that_only_loads_sleeps_until_the_tier_wakes_it(model: str, tmp_path: Path) -> None:
    llm = opened(model, kv_disk=str(tmp_path / "disk"), kv_disk_bytes=1 << 26)
    fresh = answers(llm, prompts())
    engine, released, plans = llm.loaded.engine, threading.Event(), [0]
    disk, plan = carrier(llm).stores[0], engine.scheduler.plan
    get_many = disk.get_many

    def stuck(keys: Sequence[RecordKey], use: Use, deadline: float, direct: Direct | None = None) -> list[Miss | None]:
        released.wait()
        return get_many(keys, use, deadline, direct)

    def counted(now: float) -> StepPlan:
        plans[0] += 1
        return plan(now)

    disk.get_many = stuck  # type: ignore[method-assign]  # a disk that takes its time
    engine.scheduler.plan = counted  # type: ignore[method-assign]  # watched from outside
    loop = EngineLoop(engine, llm.loaded.tokenizer, StreamConfig(), max_waiting=8)
    loop.start()

    async def ask() -> int:
        stream = loop.submit(Request(id="r", prompt=tuple(turns_after(fresh)[0]), sampling=GREEDY))
        while not await loop.ask(lambda engine: engine.offload.loading):
            await asyncio.sleep(0.01)
        before = plans[0]
        await asyncio.sleep(0.2)
        # Whoever asks the loop wakes it too; a loop that spins makes thousands.
        assert plans[0] < before + 10
        released.set()
        async for _ in stream.deltas():
            pass
        return stream.cached_tokens

    assert asyncio.run(ask()) == KEPT
    loop.stop()
    llm.close()


def damage(folder: Path) -> None:
    """A bit of every page of records."""
    for file in (folder / "kveik-kv").glob("records-*"):
        content = bytearray(file.read_bytes())
        for at in range(500, len(content), 4096):
            content[at] ^= 1
        file.write_bytes(content)


def test_damaged_records_are_misses_and_never_wrong_tokens(model: str, tmp_path: Path) -> None:
    llm = opened(model, kv_disk=str(tmp_path / "disk"), kv_disk_bytes=1 << 26)
    fresh = answers(llm, prompts())
    damage(tmp_path / "disk")
    again = answers(llm, turns_after(fresh))
    assert [tokens for tokens, _ in again] == plainly(model, turns_after(fresh))
    assert mover(llm).snapshot("disk").counts.misses[Miss.DAMAGED] > 0
    llm.close()


def test_a_record_that_was_found_damaged_is_written_anew_and_not_found_so_again(model: str, tmp_path: Path) -> None:
    llm = opened(model, kv_disk=str(tmp_path / "disk"), kv_disk_bytes=1 << 26)
    fresh = answers(llm, prompts())
    damage(tmp_path / "disk")
    damaged = carrier(llm).stores[0].records
    answers(llm, turns_after(fresh))
    found = mover(llm).snapshot("disk").counts.misses[Miss.DAMAGED]
    answers(llm, prompts())
    llm.close()
    with contextlib.closing(store_at(tmp_path / "disk" / "kveik-kv", SystemClock(), read_only=True)) as store:
        left = verify(store).misses[Miss.DAMAGED]
    assert found > len(prompts()) * 5, "a load found one damaged record only"
    assert left <= damaged - found


def test_two_engines_on_one_folder_are_refused(model: str, tmp_path: Path) -> None:
    first = opened(model, kv_disk=str(tmp_path / "disk"), kv_disk_bytes=1 << 26)
    with pytest.raises(Unreachable, match="engine"):
        opened(model, kv_disk=str(tmp_path / "disk"), kv_disk_bytes=1 << 26)
    first.close()


def test_the_memory_for_keys_and_values_can_be_divided_by_one_number(model: str) -> None:
    whole = opened(model, num_gpu_blocks_override=None, kv_cache_memory_bytes=1 << 24)
    part = opened(model, num_gpu_blocks_override=None, kv_cache_memory_bytes=1 << 24, hybrid_kv_cache_fraction=0.25)
    assert part.loaded.plan.memory.ram_bytes == 1 << 22
    assert part.loaded.plan.memory.budget_bytes == whole.loaded.plan.memory.budget_bytes * 3 // 4
    assert carrier(part).stores[0].capacity_bytes == 1 << 22
    for llm in (whole, part):
        llm.close()


def test_tiers_without_prefix_caching_are_refused() -> None:
    with pytest.raises(BadValue, match="--enable-prefix-caching"):
        CacheConfig(enable_prefix_caching=False, kv_ram_bytes=1)


@pytest.mark.parametrize(
    ("cache", "said"),
    [
        ({"kv_ram_bytes": 100}, "--kv-ram-bytes is 100; .* at least {least}"),
        ({"kv_remote": "redis://127.0.0.1:1/0", "kv_remote_bytes": 1}, "--kv-remote-bytes is 1; .* at least {least}"),
        ({"hybrid_kv_cache_fraction": 1e-9}, "--hybrid-kv-cache-fraction is 1e-09, .* at least [0-9.e-]+[0-9]"),
    ],
    ids=["ram", "remote", "fraction"],
)
def test_a_tier_that_would_hold_nothing_is_refused_with_what_would_do(model: str, cache: dict[str, object], said: str) -> None:
    memory: dict[str, object] = {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 1 << 24}
    with pytest.raises(BadValue, match=said.format(least="[0-9]+")) as refused:
        opened(model, **memory, **cache)
    least = float(refused.value.message.rstrip(".").rpartition(" ")[2])
    name = refused.value.param
    assert name is not None
    opened(model, **memory, **cache | {name: least if name.endswith("fraction") else int(least)}).close()


@pytest.mark.parametrize(
    ("cache", "kind"),
    [
        ({"kv_disk": "/proc/kv"}, BadValue),
        ({"kv_disk": "~nobody-here/kv"}, BadValue),
        ({"kv_remote": "nowhere"}, BadValue),
        ({"kv_remote": "redis://a"}, Unsupported),
    ],
)
def test_tiers_that_cannot_be_are_refused_before_a_model_is_read(
    model: str, cache: dict[str, object], kind: type[KveikError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_model(path: Path) -> None:
        pytest.fail("the model is read")

    monkeypatch.setattr(build, "open_model", read_model)
    if kind is Unsupported:
        monkeypatch.setattr(wire, "redis", None)
    with pytest.raises(
        kind,
        match="--kv-disk(: the folder /proc/kv/kveik-kv cannot be made| is ~nobody-here/kv; there is no such user)"
        if "kv_disk" in cache
        else "remote",
    ):
        opened(model, **cache)


def test_a_tier_says_at_start_what_it_holds_in_units(model: str, tmp_path: Path) -> None:
    sizes = {"kv_disk_bytes": 1 << 30, "kv_ram_bytes": 1 << 20}
    config = CacheConfig(num_gpu_blocks_override=40, kv_disk=str(tmp_path / "disk"), **sizes)
    lines: list[str] = []
    LLM(EngineConfig(model=ModelConfig(model=model, max_model_len=256), cache=config), lines.append).close()
    ram, disk = (line for line in lines if line.startswith("tier "))
    assert re.match(r"tier ram: at most 1\.0 MiB, [\d,]+ blocks or [\d,]+ tokens stored as int8, and 32\.0 MiB for what", ram)
    assert re.match(r"tier disk: at most 1\.0 GiB, [\d,]+ blocks or [\d,]+ tokens stored raw, and 32\.0 MiB for what", disk)


def test_a_shared_server_that_takes_no_more_keeps_what_is_known_to_be_there(model: str) -> None:
    with running() as server:
        llm = opened(model, kv_remote=server.url, kv_remote_bytes=1 << 20, kv_write_policy="write-through")
        chance, tiers = random.Random(5), offload(llm)

        def ask(count: int) -> int:
            """So many new prompts; the records known to be there afterwards."""
            for _ in range(count):
                llm.generate([[chance.randrange(3, 100) for _ in range(200)]], GREEDY)
                mover(llm).drain(llm.loaded.engine.clock.now() + 60)
                llm.loaded.engine.attend()
            return sum(one.groups.bit_count() for one in tiers.chain.tiers[0].records())

        while not tiers.chain.closed:
            ask(1)
        known = ask(1)
        assert ask(10) == known > 100
        assert len(list(carrier(llm).stores[0].contents())) >= known
        llm.close()
