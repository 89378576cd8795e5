"""Three tenants, salts, a public beginning, tiers that two engines share: nobody is served a block outside his right."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from kveik.engine.llm import LLM
from kveik.request.request import Request
from tests.bad_days.traffic import GREEDY, drawn
from tests.engine.tiered import mover, opened, read
from tests.engine.tiny import save_tiny_gemma, save_tiny_llama
from tests.offload.stores.redis_server import running

TENANTS, SALTS = (b"a", b"b", b"c"), (None, "s")
SIZE, PUBLIC = 16, 100
"""Tokens of a block, and of the public beginning."""

Who = tuple[bytes, str | None]


@dataclass
class Told:
    """What has been asked so far, by whom, with the answers: all that he may find again."""

    texts: dict[Who, list[list[int]]]

    def right(self, who: Who, prompt: list[int], public: list[int]) -> int:
        """Tokens of a prompt that may come from a cache."""
        own = max((common(prompt, text) for text in self.texts.get(who, [])), default=0)
        return max(own, common(prompt, public) // SIZE * SIZE)


def common(one: list[int], other: list[int]) -> int:
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def answered(llm: LLM, who: Who, prompt: list[int], ids: Iterator[int]) -> tuple[int, list[int]]:
    """Tokens found, and the answer."""
    engine, cached, answer = llm.loaded.engine, 0, []
    request = Request(id=f"r{next(ids)}", prompt=tuple(prompt), sampling=GREEDY, tenant=who[0], cache_salt=who[1])
    engine.add(request)
    while engine.has_work:
        report = engine.step()
        cached = report.admitted[0][1] if report.admitted else cached
        answer += [token for _, event in report.events for token in event.tokens]
        if engine.pause:
            engine.offload.mailbox.wait(engine.pause)
    mover(llm).drain(engine.clock.now() + 60)
    engine.attend()
    return cached, answer


@pytest.mark.parametrize(
    "save", [save_tiny_gemma, pytest.param(save_tiny_llama, marks=pytest.mark.slow)], ids=["gemma", "llama"]
)
def test_nobody_is_served_what_another_tenant_or_salt_has_computed(save: Callable[[Path], Path], tmp_path: Path) -> None:
    chance, ids, told = random.Random(4), count(), Told({})
    public, bases = drawn(chance, PUBLIC), [drawn(chance, 260) for _ in range(3)]
    (tmp_path / "public.json").write_text(json.dumps(public))
    bases = [bases[0], *([*public, *base] for base in bases[1:])]
    model = str(save(tmp_path / "model"))
    with running() as server:
        cache: dict[str, object] = {"kv_remote": server.url, "kv_write_policy": "write-through", "kv_ram_encoding": "raw"}
        cache |= {"public_prefix": (str(tmp_path / "public.json"),), "kv_ram_bytes": 1 << 20, "kv_disk_bytes": 4 << 20}
        engines = [opened(model, **cache, kv_disk=str(tmp_path / name)) for name in ("one", "two")]
        plain = opened(model, enable_prefix_caching=False)
        found = lawful = 0
        for _ in range(60):
            who, base = (chance.choice(TENANTS), chance.choice(SALTS)), chance.choice(bases)
            prompt = [*base[: chance.randrange(20, len(base))], *drawn(chance, chance.randrange(1, 40))]
            cached, answer = answered(chance.choice(engines), who, prompt, ids)
            right = told.right(who, prompt, public)
            assert cached <= right, f"{who} was served {cached} tokens and may have {right}"
            assert tuple(answer) == plain.generate([prompt], GREEDY)[0].tokens
            told.texts.setdefault(who, []).append([*prompt, *answer])
            found, lawful = found + cached, lawful + right
        # Whoever finds nothing respects every right.
        assert found > lawful / 2
        reads = {tier: sum(read(llm, tier) for llm in engines) for tier in ("ram", "disk", "remote")}
        assert min(reads.values()) > 0, reads
        for llm in (*engines, plain):
            llm.close()
