"""Tenants with reservations, maxima, salts and public prefixes in one pool: laws 1, 4 and 6 while requests run and wait."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from kveik.cache.eviction.hazard import HazardPolicy
from kveik.cache.eviction.lru import LruPolicy
from kveik.cache.eviction.policy import EvictionPolicy
from kveik.cache.eviction.tenants import Grant, TenantPolicy
from kveik.cache.key_chains import PublicPrefixes
from kveik.cache.kv_cache_manager import KVCacheManager
from kveik.cache.layout import LayerGroup
from kveik.config import ScheduleConfig
from kveik.errors import DoesNotFit
from kveik.offload.tier import Tier, TierSpec
from kveik.offload.tier_chain import TierChain
from kveik.request.request import Request, SamplingParams
from kveik.request.sequence import Sequence as Choice
from kveik.schedule.scheduler import Scheduler
from tests.offload.making import Stores
from tests.schedule.making import EOS, Desk
from tests.seeds import over_seeds

SIZE, BLOCKS, CONTEXT, CHUNK = 4, 40, 48, 16
GRANTS = {b"a": Grant(12), b"b": Grant(8, 14), b"c": Grant(0, 6)}
TENANTS = (b"a", b"b", b"c")
POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": LruPolicy,
    "hazard": lambda: HazardPolicy(SIZE, random.Random(0), samples=4),
}


class Tenancy:
    """A desk in whose pool several tenants live, and what each wrote."""

    def __init__(self, make: Callable[[], EvictionPolicy], windows: Sequence[int | None], chance: random.Random) -> None:
        self.chance = chance
        self.prefixes = [[chance.randrange(1, 3) for _ in range(12)] for _ in range(2)]
        self.public = PublicPrefixes(self.prefixes, SIZE)
        self.policy = TenantPolicy(GRANTS, make)
        groups = [LayerGroup((number,), 1, 4, window) for number, window in enumerate(windows)]
        self.kv_cache = KVCacheManager(
            groups,
            [BLOCKS] * len(groups),
            block_size=SIZE,
            rows=4,
            max_model_len=CONTEXT,
            max_chunk=CHUNK,
            eviction=self.policy,
            public=self.public,
            record_facts=True,
        )
        tiers = [
            Tier(
                TierSpec(name=name, capacity_bytes=size, record_bytes=(1,) * len(groups), factor=None),
                TenantPolicy({b"a": Grant(size // 4), b"b": Grant(0, size // 3)}, make, weighed=True),
            )
            for name, size in (("ram", 60), ("disk", 150))
        ]
        self.below = TierChain(groups, SIZE, tiers)
        self.stores = Stores(self.below, take_facts=self.kv_cache.take_facts)
        limits = ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=32, prefill_chunk_size=CHUNK)
        self.desk = Desk(Scheduler(self.kv_cache, limits, CONTEXT, frozenset({EOS})))
        self.asked: list[tuple[bytes, str | None, Choice]] = []

    def ask(self) -> None:
        chance, number = self.chance, next(self.desk.ids)
        begin = chance.choice(self.prefixes)[: chance.randrange(13)] if chance.random() < 0.6 else []
        prompt = [*begin, *(chance.randrange(1, 3) for _ in range(chance.randrange(1, 30)))]
        tenant, salt = chance.choice(TENANTS), chance.choice((None, "s"))
        request = Request(
            id=f"r{number}",
            prompt=tuple(prompt),
            sampling=SamplingParams(max_tokens=chance.randrange(1, 7)),
            tenant=tenant,
            cache_salt=salt,
        )
        choice = Choice.start(id=number, request=request, choice=0, seed=0, arrived=self.desk.now)
        self.desk.scheduler.add(choice)
        self.asked.append((tenant, salt, choice))

    def reach(self, tenant: bytes, salt: str | None, prompt: list[int]) -> int:
        """Tokens that somebody would find in the pool and below, were he to ask."""
        self.kv_cache.open(-1, prompt, request="probe", tenant=tenant, salt=salt)
        match = self.kv_cache.match(-1, len(prompt))
        hit = (match.tokens, match.full) if match else (0, 0)
        below = self.below.found(self.kv_cache.chain_keys(-1, len(prompt)), hit, self.kv_cache.in_pool)
        self.kv_cache.close(-1, 0.0)
        return int(below.prospect.tokens[-1])

    def idle(self) -> list[bytes]:
        """Tenants of whom nothing runs or waits: whatever they lose now, they lose to others."""
        busy = {tenant for tenant, _, one in self.asked if one.finish_reason is None}
        return [tenant for tenant in TENANTS if tenant not in busy]

    def kept(self) -> dict[bytes, set[bytes]]:
        """Per tenant, what of it is known to be cached."""
        keys = self.kv_cache._groups[0].index.by_key
        return {tenant: {key for key in keys if self.policy.owner_of(key) == tenant} for tenant in TENANTS}


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("windows", [(None,), (None, 9)])
@over_seeds(6)
def test_everybody_finishes_and_nobody_takes_what_is_anothers(
    make: Callable[[], EvictionPolicy], windows: Sequence[int | None], seed: int
) -> None:
    world = Tenancy(make, windows, random.Random(seed))
    asked = crowded = 0
    while asked < 80 or world.desk.scheduler.has_work:
        if asked < 80 and world.chance.random() < 0.6:
            world.ask()
            asked += 1
        if not world.desk.scheduler.has_work:
            continue
        before, idle = world.kept(), world.idle()
        world.desk.step()
        world.stores.work(world.chance.randrange(8), world.desk.now)
        after = world.kept()
        for tenant in idle:
            lost = before[tenant] - after[tenant]
            crowded += bool(lost)
            left = len(after[tenant])
            assert not lost or left >= GRANTS[tenant].reserved, "a tenant lost what is reserved for it"
        assert world.desk.step_count < 3000, "it does not come to an end"
    assert crowded > 5
    assert_hits_are_rightful(world)
    world.stores.work()
    assert_tiers_know_whose_is_whose(world)


def assert_tiers_know_whose_is_whose(world: Tenancy) -> None:
    """Law 4, below the pool: with another's prompt nobody reaches further than with what he wrote himself or all may have."""
    reached = 0
    for _, _, one in world.asked:
        prompt = list(one.request.prompt)
        for tenant in (*TENANTS, b"d", b""):
            for salt in (None, "s"):
                own = max(
                    (common(prompt, it.tokens) for who, how, it in world.asked if (who, how) == (tenant, salt)), default=0
                )
                found = world.reach(tenant, salt, prompt)
                assert found <= max(own, SIZE * world.public.blocks(prompt))
                reached += found
    assert reached > 0
    assert any(len(tier) for tier in world.below.tiers)


def assert_hits_are_rightful(world: Tenancy) -> None:
    """Law 4: of others' prompts nobody finds more than the public blocks of his own."""
    for place, (tenant, salt, one) in enumerate(world.asked):
        prompt = list(one.request.prompt)
        own = 0
        for other_place, (who, how, other) in enumerate(world.asked):
            if other_place != place and (who, how) == (tenant, salt):
                own = max(own, common(prompt, other.tokens))
        hit = one.cached_tokens or 0
        assert hit <= max(own, SIZE * world.public.blocks(prompt))
    assert world.desk.scheduler.prefix_hits > 0


def common(left: Sequence[int], right: Sequence[int]) -> int:
    return next((place for place, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def test_what_is_reserved_leaves_room_for_one_long_request_or_the_pool_is_refused() -> None:
    groups = [LayerGroup((0,), 1, 4, None)]
    policy = TenantPolicy({b"a": Grant(5)}, LruPolicy)
    with pytest.raises(DoesNotFit, match="5 are reserved"):
        KVCacheManager(groups, [12], block_size=SIZE, rows=2, max_model_len=32, eviction=policy)
    policy = TenantPolicy({b"a": Grant(4)}, LruPolicy)
    KVCacheManager(groups, [12], block_size=SIZE, rows=2, max_model_len=32, eviction=policy)


def test_a_burst_of_one_tenant_leaves_anothers_reservation_alone() -> None:
    """Thirty different prompts of c, d and e; what a has reserved is still there, to the block."""
    world = Tenancy(LruPolicy, (None,), random.Random(0))
    ask(world, b"a", list(range(100, 148 - 4)))
    world.desk.finish()
    before = world.kept()[b"a"]
    assert len(before) <= GRANTS[b"a"].reserved
    for number in range(30):
        ask(world, (b"c", b"d", b"e")[number % 3], list(range(1000 * number + 200, 1000 * number + 240)))
    world.desk.finish()
    assert world.kept()[b"a"] == before


def ask(world: Tenancy, tenant: bytes, prompt: list[int]) -> None:
    number = next(world.desk.ids)
    request = Request(id=f"r{number}", prompt=tuple(prompt), sampling=SamplingParams(max_tokens=2), tenant=tenant)
    choice = Choice.start(id=number, request=request, choice=0, seed=0, arrived=world.desk.now)
    world.desk.scheduler.add(choice)
