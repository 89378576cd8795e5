"""Bytes in, blocks out; and where one sequence does not fit, settings that really work."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as some

from kveik.cache.kv_cache_manager import KVCacheManager
from kveik.cache.layout import BlockLayout, LayerGroup, blocks_at_most, blocks_for
from kveik.cache.memory_plan import MemoryPlan, plan_memory
from kveik.errors import DoesNotFit
from kveik.machine.address_space import amount

GIB = 1 << 30
LLAMA = BlockLayout(LayerGroup(tuple(range(30)), 3, 64, None), 16, 2)
GEMMA = (
    BlockLayout(LayerGroup(tuple(range(5, 18, 6)), 1, 256, None), 16, 2),
    BlockLayout(LayerGroup(tuple(n for n in range(18) if n % 6 != 5), 1, 256, 512), 16, 2),
)


def plan(**changes: object) -> MemoryPlan:
    given: dict[str, object] = {
        "layouts": [LLAMA],
        "max_model_len": 2048,
        "max_chunk": 512,
        "available_bytes": 4 * GIB,
        "weight_bytes": GIB,
        "process_bytes": 0,
        "workspace_bytes": GIB // 4,
        "gpu_memory_utilization": 0.85,
    }
    return plan_memory(**{**given, **changes})  # type: ignore[arg-type]  # the tests vary one argument at a time


def test_one_group_gets_as_many_blocks_as_the_budget_holds_exactly() -> None:
    made = plan()
    budget = int(4 * GIB * 0.85) - GIB - GIB // 4
    assert made.budget_bytes == budget
    assert made.blocks == (budget // LLAMA.block_bytes,)
    assert made.cache_bytes <= budget < made.cache_bytes + LLAMA.block_bytes
    assert made.tokens == made.blocks[0] * 16
    assert made.concurrency == made.blocks[0] / 128


@pytest.mark.parametrize("layouts", [[LLAMA], GEMMA], ids=["llama", "gemma"])
def test_a_byte_per_value_and_a_scale_per_token_and_head_give_nearly_twice_the_blocks(layouts: list[BlockLayout]) -> None:
    narrow = [BlockLayout(layout.group, layout.block_size, 1, scale_bytes=2) for layout in layouts]
    dim = layouts[0].group.head_dim
    arguments = {"max_model_len": 8192, "kv_cache_memory_bytes": GIB}
    wide, made = plan(layouts=layouts, **arguments), plan(layouts=narrow, **arguments)
    assert made.tokens / wide.tokens == pytest.approx(2 * dim / (dim + 2), rel=0.002)
    assert made.cache_bytes <= GIB
    assert GIB - made.cache_bytes < min(layout.block_bytes for layout in narrow)


def test_bytes_given_outright_are_used_whatever_is_available() -> None:
    assert plan(kv_cache_memory_bytes=1000 * LLAMA.block_bytes + 7, available_bytes=1).blocks == (1000,)


def test_a_number_of_blocks_given_outright_is_used_in_every_group() -> None:
    assert plan(layouts=GEMMA, num_gpu_blocks_override=200).blocks == (200, 200)


def test_a_windowed_group_has_room_for_as_many_typical_sequences_as_a_full_one() -> None:
    made = plan(layouts=GEMMA, max_model_len=32768)
    full, windowed = made.blocks
    typical = [blocks_at_most(layout.group, 4096, 16, 512) for layout in GEMMA]
    assert full / typical[0] == pytest.approx(windowed / typical[1], rel=0.02)
    assert made.cache_bytes <= made.budget_bytes
    assert made.budget_bytes - made.cache_bytes < min(layout.block_bytes for layout in GEMMA)


def test_short_contexts_need_as_many_windowed_blocks_as_full_ones() -> None:
    full, windowed = plan(layouts=GEMMA, max_model_len=256).blocks
    assert abs(full - windowed) <= 5


@given(
    budget=some.integers(0, 3_000_000),
    max_model_len=some.integers(1, 600),
    chunk=some.integers(1, 64),
    windows=some.lists(some.sampled_from((None, 8, 100)), min_size=1, max_size=3),
    size=some.sampled_from((8, 16, 32, 64)),
)
def test_a_plan_always_holds_the_longest_sequence_and_never_exceeds_its_budget(
    budget: int, max_model_len: int, chunk: int, windows: list[int | None], size: int
) -> None:
    layouts = [BlockLayout(LayerGroup((0,) * (n + 1), 1, 8, window), size, 2) for n, window in enumerate(windows)]
    least = [blocks_at_most(layout.group, max_model_len, size, chunk) for layout in layouts]
    smallest = sum(count * layout.block_bytes for count, layout in zip(least, layouts, strict=True))
    arguments = {"layouts": layouts, "max_model_len": max_model_len, "max_chunk": chunk, "kv_cache_memory_bytes": budget}
    if smallest > budget:
        with pytest.raises(DoesNotFit):
            plan(**arguments)
        return
    made = plan(**arguments)
    assert made.cache_bytes <= budget
    assert all(count >= low for count, low in zip(made.blocks, least, strict=True))
    assert made.concurrency >= 1
    # One formula: the KV cache manager accepts what the plan made.
    groups = [layout.group for layout in layouts]
    KVCacheManager(groups, made.blocks, block_size=size, rows=1, max_model_len=max_model_len, max_chunk=chunk)


def numbers(message: str, flag: str) -> list[float]:
    """The values that the remedies give for a flag."""
    return [float(found) for found in re.findall(rf"{flag} ([0-9.]+[0-9])", message.split("What would work")[1])]


def proposed(message: str, surely: bool) -> list[int]:
    """Bytes of blocks that are proposed, `surely` or only where the machine has them."""
    counts = [int(count) for count in numbers(message, "--kv-cache-memory-bytes")]
    assert len(counts) == 1 or (not counts and not surely)
    return counts


@pytest.mark.parametrize("layouts", [[LLAMA], GEMMA], ids=["llama", "gemma"])
@pytest.mark.parametrize("given", [{"available_bytes": 2 * GIB}, {"kv_cache_memory_bytes": 20 << 20}], ids=["share", "bytes"])
def test_what_does_not_fit_is_refused_with_numbers_that_work(layouts: list[BlockLayout], given: dict[str, int]) -> None:
    arguments = {"layouts": layouts, "max_model_len": 131072 if "available_bytes" in given else 8192, **given}
    arguments |= {"weight_bytes": GIB, "workspace_bytes": GIB // 2}
    with pytest.raises(DoesNotFit) as refused:
        plan(**{**arguments, "gpu_memory_utilization": 0.76})
    message = refused.value.message
    (length,) = numbers(message, "--max-model-len")
    assert plan(**{**arguments, "gpu_memory_utilization": 0.76, "max_model_len": int(length)}).concurrency >= 1
    with pytest.raises(DoesNotFit):
        plan(**{**arguments, "gpu_memory_utilization": 0.76, "max_model_len": int(length) + 16})
    for count in proposed(message, "kv_cache_memory_bytes" in given):
        assert plan(**{**arguments, "kv_cache_memory_bytes": count}).concurrency == 1
        with pytest.raises(DoesNotFit):
            plan(**{**arguments, "kv_cache_memory_bytes": count - 1})
    third = numbers(message, "--gpu-memory-utilization") or numbers(message, "--num-gpu-blocks-override")
    assert third or "bytes more memory" in message


def test_a_share_of_memory_that_is_proposed_works() -> None:
    arguments = {"max_model_len": 30000, "available_bytes": 4 * GIB}
    with pytest.raises(DoesNotFit) as refused:
        plan(**arguments, gpu_memory_utilization=0.4)
    (share,) = numbers(refused.value.message, "--gpu-memory-utilization")
    assert plan(**arguments, gpu_memory_utilization=share).concurrency >= 1


@pytest.mark.parametrize("fraction", [0.3, 0.98, 0.999999])
@pytest.mark.parametrize("given", [{"available_bytes": 2 * GIB}, {"kv_cache_memory_bytes": 300 << 20}], ids=["share", "bytes"])
def test_where_a_share_lies_below_the_pool_every_number_that_is_proposed_leaves_enough(
    fraction: float, given: dict[str, int]
) -> None:
    arguments = {"max_model_len": 131072, **given}
    with pytest.raises(DoesNotFit) as refused:
        plan(**arguments, hybrid_fraction=fraction)
    message = refused.value.message
    for count in proposed(message, False):
        assert plan(**{**arguments, "kv_cache_memory_bytes": count}, hybrid_fraction=fraction).concurrency >= 1
        with pytest.raises(DoesNotFit):
            plan(**{**arguments, "kv_cache_memory_bytes": int(count * 0.999)}, hybrid_fraction=fraction)
    assert not numbers(message, "--num-gpu-blocks-override")


def test_a_share_below_the_pool_and_a_share_of_memory_that_are_proposed_work() -> None:
    arguments = {"max_model_len": 8192, "available_bytes": 4 * GIB}
    with pytest.raises(DoesNotFit) as refused:
        plan(**arguments, gpu_memory_utilization=0.4, hybrid_fraction=0.7)
    message = refused.value.message
    (fraction,) = numbers(message, "--hybrid-kv-cache-fraction")
    assert plan(**arguments, gpu_memory_utilization=0.4, hybrid_fraction=fraction).concurrency >= 1
    (share,) = numbers(message, "--gpu-memory-utilization")
    assert plan(**arguments, gpu_memory_utilization=share, hybrid_fraction=0.7).concurrency >= 1


@pytest.mark.parametrize("available", [2 * GIB, 8 * GIB])
def test_beside_a_tier_in_memory_only_what_the_machine_has_is_proposed_and_a_smaller_tier(available: int) -> None:
    arguments = {"max_model_len": 2048, "available_bytes": available, "workspace_bytes": 0, "weight_bytes": GIB // 8}
    with pytest.raises(DoesNotFit) as refused:
        plan(**arguments, ram_bytes=7 * GIB)
    message = refused.value.message
    assert f"- --kv-ram-bytes {7 * GIB} leaves" in message
    (smaller,) = numbers(message, "--kv-ram-bytes")
    assert plan(**arguments, ram_bytes=int(smaller)).concurrency == 1
    with pytest.raises(DoesNotFit):
        plan(**arguments, ram_bytes=int(smaller) + LLAMA.block_bytes)
    counts = numbers(message, "--kv-cache-memory-bytes")
    assert len(counts) == (available > 7 * GIB)
    for count in counts:
        assert count + 7 * GIB + GIB // 8 <= available
    assert "in memory" in plan(**arguments, ram_bytes=int(smaller)).lines()[0]


def test_too_few_blocks_given_outright_are_refused_with_the_number_that_works() -> None:
    with pytest.raises(DoesNotFit) as refused:
        plan(num_gpu_blocks_override=50, max_model_len=801)
    assert numbers(refused.value.message, "--max-model-len") == [800]
    assert numbers(refused.value.message, "--num-gpu-blocks-override") == [51]
    assert plan(num_gpu_blocks_override=50, max_model_len=800).blocks == (50,)
    assert plan(num_gpu_blocks_override=51, max_model_len=801).blocks == (51,)


def test_weights_that_leave_nothing_are_refused_without_a_negative_number() -> None:
    with pytest.raises(DoesNotFit) as refused:
        plan(available_bytes=GIB)
    assert "leaves 0 bytes" in refused.value.message
    assert "bytes more memory" in refused.value.message
    assert "-" not in re.sub(r"--[a-z-]+| - ", "", refused.value.message)


def test_the_plan_describes_itself() -> None:
    lines = plan(layouts=GEMMA, max_model_len=32768).lines()
    text = "\n".join(lines)
    assert "3 layers, full attention" in text
    assert "15 layers, window 512" in text
    assert "sequences of 32768 tokens (--max-model-len)" in text
    assert all(len(line) < 128 for line in lines)


def test_the_process_has_a_share_that_the_blocks_do_not_get_and_the_plan_prints() -> None:
    without, found = plan(), plan(process_bytes=GIB // 4)
    assert (without.blocks[0] - found.blocks[0]) * LLAMA.block_bytes == pytest.approx(GIB // 4, abs=LLAMA.block_bytes)
    assert found.planned_bytes == found.weight_bytes + found.workspace_bytes + GIB // 4 + found.cache_bytes
    text = "\n".join(found.lines())
    assert "process 256.0 MiB" in text
    assert f"planned memory {amount(found.planned_bytes)} in all" in text


def test_the_context_is_counted_in_whole_blocks() -> None:
    least = blocks_for(2047, 16) * LLAMA.block_bytes
    assert plan(kv_cache_memory_bytes=least, max_model_len=2047).blocks == (128,)
