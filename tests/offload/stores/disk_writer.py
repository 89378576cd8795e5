"""Writes to a disk store for ever and prints what is stored: python -m tests.offload.stores.disk_writer FOLDER SEED"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from kveik.clock import SystemClock
from kveik.offload.stores.disk import DiskStore
from tests.offload.stores.records import FORMATS, key_of, pairs

CAPACITY = 1 << 20
NUMBERS = 400


def main(folder: Path, seed: int) -> None:
    chance, store = random.Random(seed), DiskStore(folder, FORMATS, CAPACITY, SystemClock())
    print("open", flush=True)
    while True:
        group = chance.randrange(3)
        numbers = [chance.randrange(NUMBERS) for _ in range(8)]
        stored = store.put_many(pairs(numbers, group))
        print(*(f"{group}:{number}" for number, refusal in zip(numbers, stored, strict=True) if refusal is None), flush=True)
        store.delete_many([key_of(chance.randrange(NUMBERS), group) for _ in range(8)])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
