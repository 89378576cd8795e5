"""Pool memory of the CPU: tensors, records as bytes, copies in order; and what the device does around it."""

from __future__ import annotations

import mmap
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kveik.cache.kv_cache_manager import KVCacheManager
from kveik.cache.layout import BlockCopy, BlockLayout, LayerGroup, blocks_for
from kveik.config import CacheConfig, EngineConfig, ModelConfig
from kveik.device.cpu import CpuDevice, CpuPoolMemory
from kveik.engine.llm import LLM
from kveik.errors import BadValue, DoesNotFit
from kveik.kernels.kv_types import FP8_E4M3, FP8_E5M2, INT8, KvType, parts, plain, quantise
from tests.engine.tiny import save_tiny_gemma
from tests.seeds import over_seeds

GROUPS = (LayerGroup((0, 2), 1, 2, None), LayerGroup((1,), 2, 2, 8))


def pool(blocks: int = 6, size: int = 4) -> CpuPoolMemory:
    layouts = [BlockLayout(group, size, 4) for group in GROUPS]
    return CpuPoolMemory(layouts, [blocks] * len(layouts), torch.float32)


def test_the_tensors_have_the_promised_shape_and_bytes() -> None:
    made = pool()
    assert [tuple(tensor.shape) for tensor in made.tensors] == [(6, 2, 2, 1, 4, 2), (6, 1, 2, 2, 4, 2)]
    assert sum(tensor.nbytes for tensor in made.tensors) == 2 * 6 * 32 * 4
    assert all(tensor.is_contiguous() for tensor in made.tensors)


def test_an_unused_pool_costs_no_memory() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE

    before = resident()
    large = CpuPoolMemory([BlockLayout(GROUPS[0], 16, 4)], [1 << 20], torch.float32)
    assert large.tensors[0].nbytes == 1 << 29
    large.tensors[0][17] = 1.0
    assert resident() - before < 1 << 26
    assert float(large.tensors[0][17].sum()) == 128.0


def test_more_memory_than_the_system_gives_is_refused_with_the_knob() -> None:
    with pytest.raises(DoesNotFit, match="--kv-cache-memory-bytes"):
        CpuPoolMemory([BlockLayout(GROUPS[0], 16, 4)], [1 << 40], torch.float32)


def test_a_copy_moves_one_whole_record_and_touches_no_other() -> None:
    made = pool()
    for tensor in made.tensors:
        tensor.copy_(torch.randn_like(tensor))
    before = [tensor.clone() for tensor in made.tensors]
    made.copy_blocks([BlockCopy(0, 1, 4)])
    before[0][4] = before[0][1]
    assert all(torch.equal(left, right) for left, right in zip(made.tensors, before, strict=True))


@pytest.mark.parametrize("kv_type", [INT8, FP8_E4M3, FP8_E5M2], ids=lambda one: one.name)
def test_a_copy_of_quantised_records_takes_their_scales_along(kv_type: KvType) -> None:
    layouts = [BlockLayout(group, 4, 1, kv_type.scale_bytes) for group in GROUPS]
    made = CpuPoolMemory(layouts, [6, 6], kv_type.storage)
    assert [tuple(tensor.shape) for tensor in made.tensors] == [(6, 2, 2, 1, 16), (6, 1, 2, 2, 16)]
    assert [tensor.nbytes for tensor in made.tensors] == [6 * layout.block_bytes for layout in layouts]
    written = torch.randn(6, 2, 2, 1, 4, 2)
    stored, scales = parts(made.tensors[0], 4)
    stored[:], scales[:] = quantise(written, kv_type)
    before = plain(made.tensors[0], 4, kv_type)
    made.copy_blocks([BlockCopy(0, 1, 4), BlockCopy(0, 4, 5), BlockCopy(1, 0, 3)])
    before[4] = before[5] = before[1]
    assert torch.equal(plain(made.tensors[0], 4, kv_type), before)
    assert torch.equal(made.tensors[0][5], made.tensors[0][1])


def test_a_source_that_is_overwritten_later_in_the_list_was_read_before() -> None:
    made = pool()
    for block in range(6):
        made.tensors[0][block] = block
    made.copy_blocks([BlockCopy(0, 1, 2), BlockCopy(0, 3, 1), BlockCopy(0, 1, 1), BlockCopy(0, 1, 5)])
    assert made.tensors[0][:, 0, 0, 0, 0, 0].tolist() == [0, 3, 1, 3, 4, 3]


def test_bytes_of_a_block_are_its_record_and_nothing_else() -> None:
    made = pool()
    for tensor in made.tensors:
        tensor.copy_(torch.randn_like(tensor))
    for group, tensor in enumerate(made.tensors):
        record = made.block(group, 4)
        assert bytes(record) == tensor[4].numpy().tobytes()
        twin = tensor.clone()
        record[:] = made.block(group, 1)
        twin[4] = twin[1]
        assert torch.equal(tensor, twin)


def test_a_dtype_that_the_plan_did_not_count_with_is_caught() -> None:
    with pytest.raises(AssertionError, match="dtype"):
        CpuPoolMemory([BlockLayout(GROUPS[0], 4, 4)], [1], torch.bfloat16)
    with pytest.raises(AssertionError, match="dtype"):
        CpuPoolMemory([BlockLayout(GROUPS[0], 4, 1, scale_bytes=2)], [1], torch.int8)


@over_seeds(30)
def test_a_source_that_is_evicted_and_taken_again_in_the_same_step_is_copied_intact(seed: int) -> None:
    """Many admissions in one step, from a pool so small that they take each other's sources; slots hold the tokens."""
    chance = random.Random(seed)
    size, made = 4, pool(blocks=9)
    kv_cache = KVCacheManager(GROUPS, [9, 9], block_size=size, rows=4, max_model_len=12)
    number, reused = 0, 0
    for _ in range(60):
        members, copies, targets = [], [], set()
        for _ in range(chance.randrange(1, 5)):
            tokens = [chance.randrange(1, 3) for _ in range(chance.randrange(2, 12))]
            kv_cache.open(number, tokens, request="r")
            match = kv_cache.match(number, len(tokens) - 1)
            if not kv_cache.can_admit(number, match):
                kv_cache.close(number, 0.0)
                continue
            admission = kv_cache.admit(number, match, len(tokens), 0.0)
            kv_cache.grow(number, len(tokens), 0.0)
            copies += admission.copies
            targets.update((copy.group, copy.target) for copy in admission.copies)
            members.append((number, tokens, admission))
            number += 1
        taken = {(group, block) for group in (0, 1) for _, _, one in members for block in kv_cache.tables[group][one.row]}
        reused += len({(copy.group, copy.source) for copy in copies} & taken)
        made.copy_blocks(copies)
        for _, tokens, admission in members:
            write(made, kv_cache, admission.row, tokens, admission.matched)
        for _, tokens, admission in members:
            assert read(made, kv_cache, admission.row, tokens) == [tokens, tokens]
        for id_, tokens, _ in members:
            kv_cache.commit(id_, len(tokens))
            kv_cache.check()
        for id_, tokens, _ in members:
            kv_cache.release(id_, len(tokens))
            kv_cache.close(id_, 0.0)
    assert reused > 0, "no source was ever taken again: the seed proves nothing"


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    opened = CpuDevice()
    yield opened
    opened.close()


def test_only_the_blocks_that_are_to_be_ready_are_prepared(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[list[int]] = []

    def prefault(pool: object, sizes: list[int], stop: threading.Event) -> threading.Thread:
        begun.append(sizes)
        thread = threading.Thread(target=stop.wait)
        thread.start()
        return thread

    monkeypatch.setattr("kveik.device.cpu.prefault", prefault)
    layouts = [BlockLayout(group, 4, 4) for group in GROUPS]
    device.allocate(layouts, [6, 2], torch.float32)
    assert begun == []
    device.allocate(layouts, [6, 2], torch.float32, ready=3)
    assert begun == [[3 * layouts[0].block_bytes, 2 * layouts[1].block_bytes]]
    # Closing ends the thread, which waits for nothing else.
    device.close()
    assert not any(thread.is_alive() for thread in device._prefaults)


def test_the_peak_of_a_step_is_its_own(device: CpuDevice) -> None:
    held = torch.ones(64 << 20, dtype=torch.uint8)
    peak = device.peak_bytes(lambda: torch.ones(32 << 20, dtype=torch.uint8))
    if peak is None:
        pytest.skip("the system does not tell the peak of a process")
    assert 31 << 20 <= peak < held.nbytes


def test_the_log_names_the_instruction_set_and_the_huge_pages(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kveik.device.cpu.bytes_on_huge_pages", lambda: 79 << 20)
    monkeypatch.setattr("kveik.device.cpu.collapse_onto_huge_pages", lambda: 90 << 20)
    device.keep_weights(98 << 20)
    kernels, pages = device.describe()
    assert device.isa in kernels or device.isa == "none"
    assert pages == "79 MiB of the process on huge pages"
    # Far less than the weights: they are moved.
    device.keep_weights(100 << 20)
    assert device.describe()[1] == "90 MiB of the process on huge pages"


def test_an_instruction_set_that_the_processor_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVEIK_ISA", "sparc")
    with pytest.raises(BadValue, match="KVEIK_ISA is 'sparc'"):
        CpuDevice()


def test_an_engine_prepares_its_first_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    allocate = CpuDevice.allocate

    def watched(self: CpuDevice, *arguments: Any, ready: int = 0) -> CpuPoolMemory:
        asked.append(ready)
        return allocate(self, *arguments, ready=ready)

    monkeypatch.setattr(CpuDevice, "allocate", watched)
    model = ModelConfig(model=str(save_tiny_gemma(tmp_path)), threads=1)
    llm = LLM(EngineConfig(model=model, cache=CacheConfig(num_gpu_blocks_override=512)))
    # Once for the measured step, which needs none ahead.
    assert asked == [0, blocks_for(llm.loaded.max_model_len, llm.loaded.config.cache.block_size)]
    llm.close()


def write(made: CpuPoolMemory, kv_cache: KVCacheManager, row: int, tokens: list[int], start: int) -> None:
    for group, tensor in enumerate(made.tensors):
        for position in range(start, len(tokens)):
            tensor[int(kv_cache.tables[group][row, position // 4]), :, :, :, position % 4] = tokens[position]


def read(made: CpuPoolMemory, kv_cache: KVCacheManager, row: int, tokens: list[int]) -> list[list[int]]:
    """Per group, what the row's slots hold; outside a window, what they should (nobody reads them)."""
    found = []
    for group, tensor in enumerate(made.tensors):
        window = GROUPS[group].window
        lowest = 0 if window is None else max(0, len(tokens) - 1 - window + 1)
        slots = [
            int(tensor[int(kv_cache.tables[group][row, position // 4]), 0, 0, 0, position % 4, 0])
            for position in range(lowest, len(tokens))
        ]
        found.append(tokens[:lowest] + slots)
    return found
