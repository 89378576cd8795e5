"""Speed of records between the pool and the tiers below it: python -m benchmarks.tiers [--folder PATH] [--write docs]

Blocks of SmolLM2-135M, 16 tokens: 360 KiB of bfloat16. Every rate is in bytes of the pool, by one thread, with the files in the
page cache. "Time of plain reading": the seconds of the whole way (read, checksum, decode into blocks of the pool) over the
seconds of reading the same bytes into the same blocks, taken in turn; the median of the rounds.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch

from benchmarks.command import parser_of, run
from benchmarks.facts import environment
from benchmarks.pages import publish, table
from kveik.clock import SystemClock
from kveik.offload.availability import BreakerLimits
from kveik.offload.counts import RecordsLoaded
from kveik.offload.mover import MovedTier, Mover
from kveik.offload.stores.disk import DiskStore
from kveik.offload.stores.encode import Codec, Int8Rows, Raw
from kveik.offload.stores.ram import RamStore
from kveik.offload.stores.record import HEADER_BYTES, Miss, RecordFormat, RecordKey
from kveik.offload.stores.remote import RemoteLimits, RemoteStore
from kveik.offload.stores.store import Store

PAGE = "CACHE.md"
LAYERS, KV_HEADS, SLOTS, HEAD_DIM = 30, 3, 16, 64
ROWS = LAYERS * 2 * KV_HEADS * SLOTS
BLOCK_BYTES = ROWS * HEAD_DIM * 2
CAPACITY = 1 << 30
ROUNDS = 7
PATIENT = BreakerLimits(timeout=1e9)
"""A machine that is busy with other things must not open a breaker."""

CODECS: dict[str, Codec] = {"raw": Raw(BLOCK_BYTES), "int8": Int8Rows(ROWS, HEAD_DIM, torch.bfloat16)}
KEYS = [RecordKey(0, number.to_bytes(32, "big")) for number in range(512)]


def format_of(codec: Codec) -> RecordFormat:
    return RecordFormat(bytes(32), 0, SLOTS, codec.encoding, codec.payload_bytes)


def seconds_of(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def pool_of(blocks: int) -> tuple[torch.Tensor, list[memoryview]]:
    """Blocks as the pool has them, filled, and the same memory as the tiers see it."""
    pool = torch.randn(blocks, ROWS, HEAD_DIM, generator=torch.Generator().manual_seed(0)).bfloat16()
    content = memoryview(pool.view(torch.uint8).numpy()).cast("B")
    return pool, [content[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES] for at in range(blocks)]


def records_of(codec: Codec, blocks: Sequence[memoryview]) -> list[tuple[RecordKey, memoryview]]:
    form, records = format_of(codec), []
    for key, block in zip(KEYS, blocks, strict=False):
        record = memoryview(bytearray(form.record_bytes))
        codec.encode(block, record[HEADER_BYTES:])
        form.seal(record, key.block)
        records.append((key, record))
    return records


def load(mover: Mover, tier: str, targets: Sequence[memoryview]) -> None:
    """As it is served, but on this thread."""
    mover.load(tier, list(zip(KEYS, targets, strict=False)), 1, float("inf"))
    mover.step()
    [loaded] = mover.completions()
    assert isinstance(loaded, RecordsLoaded)
    assert not any(loaded.misses)


def read_plainly(file: Path, targets: Sequence[memoryview], size: int) -> None:
    """The same number of bytes from a file into the same blocks."""
    fd = os.open(file, os.O_RDONLY)
    try:
        for at, target in enumerate(targets):
            assert os.preadv(fd, [target[:size]], at * size) == size
    finally:
        os.close(fd)


def codecs(blocks: Sequence[memoryview]) -> dict[str, float]:
    """GB/s of encoding with the checksum, and of verifying and decoding."""
    found = {}
    for name, codec in CODECS.items():
        form, record, size = (
            format_of(codec),
            memoryview(bytearray(codec.payload_bytes + HEADER_BYTES)),
            len(blocks) * BLOCK_BYTES,
        )

        def encode(codec: Codec = codec, form: RecordFormat = form, record: memoryview = record) -> None:
            for block in blocks:
                codec.encode(block, record[HEADER_BYTES:])
                form.seal(record, KEYS[0].block)

        def decode(codec: Codec = codec, form: RecordFormat = form, record: memoryview = record) -> None:
            for block in blocks:
                payload = form.verify(record, KEYS[0])
                assert not isinstance(payload, Miss)
                codec.decode(payload, block)

        found[f"{name} encode GB/s"] = size / median(seconds_of(encode) for _ in range(ROUNDS)) / 1e9
        found[f"{name} decode GB/s"] = size / median(seconds_of(decode) for _ in range(ROUNDS)) / 1e9
    return found


def store_figures(store: Store, codec: Codec, blocks: Sequence[memoryview], plain: Path) -> dict[str, float]:
    """One store: writing in batches of 16, and reading beside plain reading of as many bytes as the records have."""
    records, size = records_of(codec, blocks), len(blocks) * BLOCK_BYTES
    batches = [records[start : start + 16] for start in range(0, len(records), 16)]
    writing = seconds_of(lambda: [store.put_many(batch) for batch in batches])
    _, targets = pool_of(len(blocks))
    mover = Mover([MovedTier(store=store, codecs=[codec], limits=PATIENT)], SystemClock())
    load(mover, store.name, targets)
    mine, plainly = [], []
    for _ in range(ROUNDS):
        mine.append(seconds_of(lambda: load(mover, store.name, targets)))
        plainly.append(seconds_of(lambda: read_plainly(plain, targets, codec.payload_bytes)))
    mover.close()
    return {
        "write GB/s": size / writing / 1e9,
        "read GB/s": size / median(mine) / 1e9,
        "plain GB/s": size / median(plainly) / 1e9,
        "of plain reading": median(one / other for one, other in zip(mine, plainly, strict=True)),
    }


@contextmanager
def redis_server() -> Iterator[str | None]:
    """The address of a server for this run, None where none is installed."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        yield None
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        time.sleep(1.0)
        yield f"redis://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def stores(folder: Path, blocks: Sequence[memoryview]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    clock = SystemClock()
    plain = folder / "plain"
    plain.write_bytes(b"".join(blocks))
    with redis_server() as url:
        for name, codec in CODECS.items():
            forms = [format_of(codec)]
            made: dict[str, Callable[[], Store]] = {
                "ram": lambda forms=forms: RamStore(forms, CAPACITY, clock),
                "disk": lambda forms=forms, name=name: DiskStore(folder / name, forms, CAPACITY, clock),
            }
            if url is not None:
                limits = RemoteLimits(timeout_seconds=30.0)
                made["remote"] = lambda forms=forms, limits=limits, url=url: RemoteStore(url, forms, limits, clock)
            for kind, make in made.items():
                store = make()
                found[f"{kind}, {name}"] = store_figures(store, codec, blocks, plain)
    return found


def store_microseconds(blocks: Sequence[memoryview]) -> float:
    """What handing one block to the mover takes of a step."""
    clock, codec = SystemClock(), CODECS["raw"]
    tier = MovedTier(store=RamStore([format_of(codec)], CAPACITY, clock), codecs=[codec], staging_bytes=CAPACITY)
    mover = Mover([tier], clock)
    took = []
    for _ in range(ROUNDS):
        took.append(seconds_of(lambda: [mover.store("ram", key, block) for key, block in zip(KEYS, blocks, strict=False)]))
        while mover.step():
            pass
    mover.close()
    return median(took[1:]) / len(blocks) * 1e6


def page_section(coding: dict[str, float], found: dict[str, dict[str, float]], store: float) -> str:
    rows = [["", "write", "read, verify, decode", "plain reading of its bytes", "time of plain reading"]]
    for name, rates in found.items():
        rates_shown = [f"{rates[column]:.2f} GB/s" for column in ("write GB/s", "read GB/s", "plain GB/s")]
        rows.append([name, *rates_shown, f"{rates['of plain reading']:.2f} ×"])
    coded = ", ".join(f"{name.removesuffix(' GB/s')} {rate:.1f}" for name, rate in coding.items())
    return f"{table(rows)}\n\nGB/s in memory, with the checksum: {coded}. A store takes {store:.0f} µs of the step."


def main() -> None:
    parser = parser_of("tiers", __doc__)
    parser.add_argument("--blocks", type=int, default=512, help="512 blocks are 8,192 tokens")
    parser.add_argument("--folder", type=Path, help="where the disk store goes; default: the system's folder for such files")
    given = parser.parse_args()
    torch.set_num_threads(1)
    facts = environment()
    _, blocks = pool_of(min(given.blocks, len(KEYS)))
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        found = stores(Path(folder), blocks)
    coding, store = codecs(blocks), store_microseconds(blocks)
    text = page_section(coding, found, store)
    figures = {"codecs": coding, "stores": found, "store_microseconds": store}
    publish(text, facts, given.write, name="tiers", figures=figures, page=PAGE)


if __name__ == "__main__":
    run(main)
