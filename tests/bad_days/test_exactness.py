"""Conversations that go on from wherever their keys and values are: the greedy answers are those of an engine without a cache.

Promised where the arithmetic is the same, and float32 is everywhere. The native kernels give a history whose answers were
decoded other roundings than one that is computed at once, whatever the cache does; that records come back to the bit there as
well, and what int8 records cost, is `benchmarks/records.py`'s to show.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from kveik.config import CacheConfig, EngineConfig, ModelConfig, ScheduleConfig
from kveik.engine.llm import LLM
from kveik.offload.stores.record import Miss, RecordKey
from kveik.schedule.draft import Draft
from kveik.schedule.reasons import Cause
from kveik.text.heldout import heldout_text
from tests.bad_days.traffic import GREEDY, Asked, Traffic, drawn
from tests.engine.tiered import believe, carrier, mover, read
from tests.engine.tiny import save_tiny_gemma, save_tiny_llama
from tests.offload.stores.redis_server import running

AT_ONCE = 4
WAYS = ("pool", "ram", "disk", "remote", "preempted", "mixed")


@dataclass(frozen=True)
class Subject:
    """A model, and how long its conversations are."""

    model: str
    count: int
    turns: int
    system: int
    user: int
    more: int
    tokens: list[int]
    """Of a text, from which conversations are cut."""

    @property
    def blocks(self) -> int:
        """Of the longest conversation."""
        return (self.system + self.user + self.turns * (self.more + GREEDY.max_tokens)) // 16 + 1

    def open(self, blocks: int, **cache: object) -> LLM:
        """Exact, and small steps, so that conversations take many."""
        settings: dict[str, object] = {"num_gpu_blocks_override": blocks, **cache}
        return LLM(
            EngineConfig(
                model=ModelConfig(model=self.model, dtype="float32", max_model_len=16 * self.blocks, threads=1),
                cache=CacheConfig(**settings),  # type: ignore[arg-type]  # a test's own words
                schedule=ScheduleConfig(max_num_seqs=AT_ONCE, max_num_batched_tokens=68, prefill_chunk_size=64),
            )
        )

    def conversations(self) -> list[list[Asked]]:
        """Turn by turn, answered without a cache. Three system prompts begin them."""
        chance, plain = random.Random(self.count), self.open(256, enable_prefix_caching=False)
        systems = [self._cut(chance, self.system) for _ in range(3)]
        prompts = [[*systems[number % 3], *self._cut(chance, self.user)] for number in range(self.count)]
        turns = []
        for _ in range(self.turns):
            answers = plain.generate(prompts, GREEDY)
            turns.append([Asked(tuple(ask), one.tokens, one.text) for ask, one in zip(prompts, answers, strict=True)])
            prompts = [[*one.prompt, *one.answer, *self._cut(chance, self.more)] for one in turns[-1]]
        plain.close()
        return turns

    def _cut(self, chance: random.Random, count: int) -> list[int]:
        at = chance.randrange(len(self.tokens) - count)
        return self.tokens[at : at + count]


def tiny(save: Callable[[Path], Path], folder: Path) -> Subject:
    return Subject(str(save(folder)), 6, 3, 90, 60, 30, drawn(random.Random(1), 4000))


def real(path: Path) -> Subject:
    """Longer than Gemma's window of 512."""
    model = ModelConfig(model=str(path), max_model_len=1024)
    llm = LLM(EngineConfig(model=model, cache=CacheConfig(num_gpu_blocks_override=64)))
    tokens = llm.loaded.tokenizer.encode(heldout_text("english").text[:400_000])
    llm.close()
    return Subject(str(path), 50, 2, 200, 330, 30, tokens)


@contextmanager
def cache_of(way: str, folder: Path) -> Iterator[dict[str, object]]:
    ram: dict[str, object] = {"kv_ram_bytes": 2 << 30, "kv_ram_encoding": "raw"}
    disk: dict[str, object] = {"kv_disk": str(folder / "kv"), "kv_disk_bytes": 4 << 30}
    if way == "remote":
        with running() as server:
            yield {"kv_remote": server.url, "kv_remote_bytes": 4 << 30}
    else:
        yield {"pool": {}, "ram": ram, "disk": disk, "preempted": ram, "mixed": disk}[way]


def give_way(llm: LLM, chance: random.Random) -> None:
    """Now and then a running sequence loses its blocks, and all that the pool has goes down at once."""
    scheduler, now = llm.loaded.engine.scheduler, llm.loaded.engine.clock.now()
    draft = Draft(scheduler._batch)
    if chance.random() < 0.05 and (decoding := draft.decoding()):
        scheduler._preempt(chance.choice(decoding), draft, Cause.POLICY, now)
        for number, group in enumerate(scheduler.kv_cache._groups):
            scheduler.kv_cache.evictor.evict(number, group.pool.full, now)
        llm.loaded.engine.attend()


def lose_some(llm: LLM, chance: random.Random, records: int) -> None:
    """So many records, on average, are not there any more, and nobody was told. What stands before them is loaded and the rest
    computed; in layers with a window all is, where one of the window's is lost, for what earlier cuts need was never written.
    """
    # A store has one thread that writes; it must be at rest while this one takes its place.
    mover(llm).drain(llm.loaded.engine.clock.now() + 3600)
    [store] = carrier(llm).stores
    keys: list[RecordKey] = [key for key, _ in store.contents()]
    store.delete_many([key for key in keys if chance.random() < records / len(keys)])


def go_on(subject: Subject, turns: list[list[Asked]], way: str, folder: Path) -> None:
    chance = random.Random(way)
    with cache_of(way, folder) as cache:
        llm = subject.open(subject.turns * subject.count * subject.blocks if way == "pool" else 2 * subject.blocks, **cache)
        believe(llm, 1.0)
        traffic, again = Traffic(llm, turns[0], chance, AT_ONCE), 0
        for turn in turns:
            traffic.ask_all(turn, (lambda: give_way(llm, chance)) if way == "preempted" else lambda: None)
            if way == "mixed":
                lose_some(llm, chance, subject.count)
            again += sum(len(one.prompt) for one in turn)
        found = traffic.cached_tokens / again
        assert found > 0.1, f"only {found:.0%} of the prompts were found"
        if way != "pool":
            [store] = carrier(llm).stores
            assert read(llm, store.name) > 0
            assert (mover(llm).snapshot(store.name).counts.misses[Miss.ABSENT] > 0) == (way == "mixed")
            traffic.check()
        llm.close()


@pytest.fixture(scope="module", params=[save_tiny_llama, save_tiny_gemma], ids=["llama", "gemma"])
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Subject, list[list[Asked]]]:
    subject = tiny(request.param, tmp_path_factory.mktemp("tiny"))
    return subject, subject.conversations()


@pytest.mark.parametrize("way", WAYS)
def test_conversations_go_on_as_without_a_cache(small: tuple[Subject, list[list[Asked]]], way: str, tmp_path: Path) -> None:
    go_on(*small, way, tmp_path)


@pytest.fixture(scope="module", params=["smollm2-135m", "gemma-3-270m"])
def large(request: pytest.FixtureRequest, catalogue_file: Callable[[str], Path]) -> tuple[Subject, list[list[Asked]]]:
    subject = real(catalogue_file(request.param))
    return subject, subject.conversations()


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", WAYS)
def test_fifty_conversations_of_real_models_go_on_as_without_a_cache(
    large: tuple[Subject, list[list[Asked]]], way: str, tmp_path: Path
) -> None:
    go_on(*large, way, tmp_path)
