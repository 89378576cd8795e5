"""Opening of the tiers that are asked for, with all that decides on them, and a line on what each holds at most."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kveik.cache.eviction.policy import EvictionPolicy
from kveik.cache.evictor import leading
from kveik.cache.keys import encode_parts
from kveik.cache.kv_cache_manager import KVCacheManager
from kveik.cache.layout import BlockLayout, LayerGroup
from kveik.cache.memory_plan import MemoryPlan
from kveik.clock import Clock
from kveik.config import CacheConfig
from kveik.device.device import PoolMemory
from kveik.errors import BadValue
from kveik.kernels.kv_types import KvType
from kveik.machine.address_space import amount
from kveik.observe.events import Event
from kveik.offload.carrier import TierCarrier
from kveik.offload.cost import ComputeCost, LoadCost
from kveik.offload.interface import NoOffload, Offload
from kveik.offload.mailbox import Mailbox
from kveik.offload.manager import OffloadManager
from kveik.offload.mover import MovedTier, Mover
from kveik.offload.stores.disk import DiskStore, disk_extent
from kveik.offload.stores.disk_folder import KV_FOLDER, check_folder
from kveik.offload.stores.encode import Codec, Int8Rows, Raw
from kveik.offload.stores.ram import RamStore, ram_extent
from kveik.offload.stores.record import Encoding, RecordFormat
from kveik.offload.stores.remote import RemoteLimits, RemoteStore, check_address, remote_extent
from kveik.offload.stores.store import Extent, Store
from kveik.offload.tier import FACTOR, Tier, TierSpec
from kveik.offload.tier_chain import TierChain
from kveik.offload.writer import STAGING_BYTES
from kveik.words import counted

LASTING, FOREIGN = frozenset({"disk", "remote"}), frozenset({"remote"})
"""Tiers that outlive the process, and those in which others write too."""

_STORED = {Encoding.RAW: "raw", Encoding.INT8: "as int8"}

PRIORS = {"ram": (1e-4, 3e-10), "disk": (1e-3, 1e-9), "remote": (3e-3, 5e-9)}
"""Seconds per load and byte, before a tier has been used."""


@dataclass(frozen=True, slots=True)
class TierSetting:
    """What a model and its configuration contribute to every tier."""

    config: CacheConfig
    memory: MemoryPlan
    groups: tuple[LayerGroup, ...]
    kv_type: KvType
    fingerprint: bytes
    kv_dtype: str
    """As in the blocks' keys: storage and arithmetic."""

    exact: bool
    """True when --dtype float32 asks for exact arithmetic: RAM then stores blocks as they are, unless told otherwise."""

    policy: Callable[[str, int, int], EvictionPolicy]
    """Makes a tier's eviction policy, from its name, its capacity and what one of its larger records takes there, in bytes."""

    def formats(self, codecs: Sequence[Codec]) -> list[RecordFormat]:
        """Formats of one tier's records, per group."""
        size = self.config.block_size
        return [
            RecordFormat(self._fingerprint(number), number, size, codec.encoding, codec.payload_bytes)
            for number, codec in enumerate(codecs)
        ]

    def _fingerprint(self, number: int) -> bytes:
        group = self.groups[number]
        shape = (number, repr(group.layers), group.kv_heads, group.head_dim, group.window)
        parts = ("kveik record 1", self.fingerprint, self.kv_dtype, self.config.block_size, *shape)
        return hashlib.sha256(encode_parts(parts)).digest()


@dataclass(frozen=True, slots=True)
class TierPlan:
    """One tier before it is made."""

    name: str
    codecs: tuple[Codec, ...]
    formats: tuple[RecordFormat, ...]
    extent: Extent

    def line(self, block_size: int, found: str = "") -> str:
        """Its bound, for the log and `kveik plan`."""
        blocks, bound = self.extent.usable_bytes // sum(self.extent.costs), amount(self.extent.capacity_bytes)
        return (
            f"tier {self.name}: at most {bound}, {counted(blocks, 'block', ',')} or "
            f"{counted(blocks * block_size, 'token', ',')} stored "
            f"{_STORED[self.codecs[0].encoding]}, and {amount(STAGING_BYTES)} for what waits to be written{found}"
        )


def check_tiers(config: CacheConfig, *, only_look: bool = False) -> None:
    """Refuse what can be refused before a model is loaded. `only_look`: no folder is made or locked for it.

    Raises BadValue, Unsupported, or Unreachable where another engine has the disk's folder.
    """
    if config.kv_remote:
        check_address(config.kv_remote)
    if config.kv_disk:
        check_folder(_folder(config.kv_disk) / KV_FOLDER, only_look=only_look)


def _folder(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise BadValue(f"--kv-disk is {text}; there is no such user.", param="kv_disk") from error


def plan_tiers(setting: TierSetting) -> list[TierPlan]:
    """The tiers that are asked for, from the nearest to the pool down; nothing is made or opened.

    Raises DoesNotFit, or BadValue where one would never hold anything.
    """
    plans = [_planned(setting, name) for name in _asked(setting)]
    for plan in plans:
        _check_room(setting, plan)
    return plans


def open_tiers(
    setting: TierSetting,
    kv_cache: KVCacheManager,
    compute: ComputeCost,
    memory: PoolMemory,
    clock: Clock,
    *,
    report: Callable[[str], None] = lambda _: None,
    publish: Callable[[Event], None] = lambda _: None,
) -> Offload:
    """The tiers that are asked for, before `start`. `report` gets a line for each; `publish`, what becomes of them.

    Raises Unreachable where another engine has the disk's folder, DoesNotFit, BadValue or Unsupported.
    """
    mailbox, plans = Mailbox(), plan_tiers(setting)
    if not plans:
        return NoOffload()
    tiers = [_tier(setting.config, plan, clock) for plan in plans]
    for plan, tier in zip(plans, tiers, strict=True):
        report(plan.line(setting.config.block_size, _found(tier.store)))
    chain = TierChain(setting.groups, setting.config.block_size, [_records(setting, tier) for tier in tiers])
    for number, tier in enumerate(tiers):
        if tier.store.name in LASTING - FOREIGN:
            chain.adopt(number, [(key.block, key.group) for key, _ in tier.store.contents()], clock.now())
    mover = Mover(tiers, clock, mailbox.nudge)
    carrier = TierCarrier(mover, [tier.store for tier in tiers], memory, clock, mailbox, publish)
    costs = [LoadCost(PRIORS[tier.store.name]) for tier in tiers]
    return OffloadManager(kv_cache, chain, compute, costs, carrier, publish)


def _asked(setting: TierSetting) -> list[str]:
    """Names, from the nearest to the pool down."""
    config = setting.config
    asked = {
        "ram": setting.memory.ram_bytes or config.hybrid_kv_cache_fraction,
        "disk": config.kv_disk,
        "remote": config.kv_remote,
    }
    return [name for name, value in asked.items() if value]


def _planned(setting: TierSetting, name: str) -> TierPlan:
    config = setting.config
    codecs = [_codec(setting, layout, name) for layout in setting.memory.layouts]
    formats = setting.formats(codecs)
    if name == "ram":
        extent = ram_extent(formats, setting.memory.ram_bytes)
    elif name == "disk":
        extent = disk_extent(formats, config.disk_bytes)
    else:
        extent = remote_extent(formats, config.remote_bytes)
    return TierPlan(name, tuple(codecs), tuple(formats), extent)


def _tier(config: CacheConfig, plan: TierPlan, clock: Clock) -> MovedTier:
    store: Store
    place = "--kv-ram-bytes" if config.kv_ram_bytes else "--hybrid-kv-cache-fraction"
    if plan.name == "ram":
        store = RamStore(plan.formats, plan.extent.capacity_bytes, clock)
    elif plan.name == "disk":
        assert config.kv_disk is not None
        folder = _folder(config.kv_disk)
        place = f"--kv-disk {folder.absolute()}"
        store = DiskStore(folder / KV_FOLDER, plan.formats, plan.extent.capacity_bytes, clock)
    else:
        assert config.kv_remote is not None
        limits = RemoteLimits(capacity_bytes=plan.extent.capacity_bytes)
        store = RemoteStore(config.kv_remote, plan.formats, limits, clock)
        place = f"--kv-remote {store.address}"
    return MovedTier(store=store, codecs=plan.codecs, staging_bytes=STAGING_BYTES, place=place)


def _check_room(setting: TierSetting, plan: TierPlan) -> None:
    """A tier that never holds anything is not what was asked for. Raises BadValue; the disk's store judges its own bound."""
    least, room = sum(plan.extent.costs), plan.extent.usable_bytes
    if plan.name == "disk" or room >= least:
        return
    needed = f"one block of every layer group takes {counted(least, 'byte')} there"
    if plan.name == "ram" and (fraction := setting.config.hybrid_kv_cache_fraction) is not None:
        whole = setting.memory.budget_bytes + room
        raise BadValue(
            f"--hybrid-kv-cache-fraction is {fraction:g}, which is {room} of {counted(whole, 'byte')}; {needed}: it must be "
            f"at least {math.ceil(least / whole * 1e6) / 1e6:g}.",
            param="hybrid_kv_cache_fraction",
        )
    name = f"kv_{plan.name}_bytes"
    flag = f"--{name.replace('_', '-')}"
    raise BadValue(f"{flag} is {room}; {needed}: it must be at least {least}.", param=name)


def _codec(setting: TierSetting, layout: BlockLayout, name: str) -> Codec:
    """Only RAM is too dear for blocks as they are, and not where exact answers were asked for; what lasts is exact."""
    encoding = setting.config.ram_encoding
    raw = encoding == "raw" or (encoding == "auto" and setting.exact)
    if name != "ram" or raw or setting.kv_type.quantised:
        return Raw(layout.block_bytes)
    rows = len(layout.group.layers) * 2 * layout.group.kv_heads * layout.block_size
    return Int8Rows(rows, layout.group.head_dim, setting.kv_type.values)


def _records(setting: TierSetting, tier: MovedTier) -> Tier:
    store = tier.store
    sizes = tuple(store.cost_bytes(group) for group in range(len(store.formats)))
    # Recency knows no worth, so nothing can be said about what is worth writing.
    filtered = setting.config.eviction_policy != "lru" and setting.config.write_policy == "filtered"
    spec = TierSpec(
        name=store.name,
        capacity_bytes=store.usable_bytes,
        record_bytes=sizes,
        writes=setting.config.write_policy,
        factor=FACTOR if filtered else None,
        lasts=store.name in LASTING,
        ours=store.name not in FOREIGN,
    )
    return Tier(spec, setting.policy(store.name, store.usable_bytes, sizes[leading(setting.groups)]))


def _found(store: Store) -> str:
    return f"; {counted(store.records, 'record', ',')} ({amount(store.bytes_used)}) found there" if store.records else ""
