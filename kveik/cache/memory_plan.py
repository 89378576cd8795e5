"""Memory plan: blocks that the memory holds, in blocks, tokens and sequences. Arithmetic only.

    budget = available * utilization - weights - workspace - process     or as given by --kv-cache-memory-bytes
    blocks = floor(budget / bytes of a block)                            one layer group

Several groups share the budget. Every group first gets what one sequence of `max_model_len` tokens holds of it at most
(`blocks_at_most`); beyond that, blocks are in the proportion in which a sequence of min(max_model_len, 4096) tokens holds them.
So a windowed group is not starved by many short sequences, for which it needs as many blocks as a full one, and does not take
the room of long ones. What is left by rounding goes to the groups in order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kveik.cache.layout import BlockLayout, blocks_at_most, blocks_for
from kveik.errors import DoesNotFit
from kveik.machine.address_space import amount
from kveik.words import counted

TYPICAL_TOKENS = 4096
"""Length of the sequence for which the groups' proportion is chosen: several turns of chat, or a document and an answer."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where the memory goes. `lines` prints it."""

    layouts: tuple[BlockLayout, ...]
    blocks: tuple[int, ...]
    """Per group."""

    max_model_len: int
    max_chunk: int
    available_bytes: int
    utilization: float
    weight_bytes: int
    workspace_bytes: int
    process_bytes: int
    """The process's own share: interpreter, libraries, vocabulary, and what serving adds to them."""

    budget_bytes: int
    """What the blocks may take."""

    source: str
    """Which setting decided the number of blocks."""

    ram_bytes: int = 0
    """Of memory for a tier below the blocks, beside the budget."""

    @property
    def cache_bytes(self) -> int:
        """What the blocks do take."""
        return sum(count * layout.block_bytes for count, layout in zip(self.blocks, self.layouts, strict=True))

    @property
    def planned_bytes(self) -> int:
        """All of the above: resident memory stays below."""
        return self.weight_bytes + self.workspace_bytes + self.process_bytes + self.ram_bytes + self.cache_bytes

    @property
    def tokens(self) -> int:
        """Tokens of running sequences that the blocks hold, where no sequence is longer than its groups' windows."""
        return min(count * layout.block_size for count, layout in zip(self.blocks, self.layouts, strict=True))

    @property
    def concurrency(self) -> float:
        """Sequences of `max_model_len` tokens that fit at once."""
        return self.sequences(self.max_model_len)

    def sequences(self, tokens: int) -> float:
        """Sequences of that many tokens that fit at once."""
        needed = _needed(self.layouts, tokens, self.max_chunk)
        return min(count / need for count, need in zip(self.blocks, needed, strict=True))

    def lines(self) -> tuple[str, ...]:
        """The plan, one printable line per fact."""
        groups = tuple(
            f"  group {number}: {counted(len(layout.group.layers), 'layer')}, {_window(layout)}, {counted(count, 'block')} × "
            f"{amount(layout.block_bytes)} = {amount(count * layout.block_bytes)}"
            for number, (layout, count) in enumerate(zip(self.layouts, self.blocks, strict=True))
        )
        below = f", a tier of {amount(self.ram_bytes)} in memory" if self.ram_bytes else ""
        return (
            f"memory available {amount(self.available_bytes)} × {self.utilization:g}, weights {amount(self.weight_bytes)}, "
            f"workspace {amount(self.workspace_bytes)}, process {amount(self.process_bytes)}{below}",
            f"key/value blocks {amount(self.cache_bytes)} of {amount(self.budget_bytes)} ({self.source}), "
            f"{counted(self.layouts[0].block_size, 'token')} each",
            *groups,
            f"planned memory {amount(self.planned_bytes)} in all",
            f"room for {self.concurrency:.1f} sequences of {counted(self.max_model_len, 'token')} (--max-model-len), "
            f"or {self.sequences(min(512, self.max_model_len)):.1f} of {min(512, self.max_model_len)}",
        )


def plan_memory(
    *,
    layouts: Sequence[BlockLayout],
    max_model_len: int,
    max_chunk: int,
    available_bytes: int,
    weight_bytes: int,
    workspace_bytes: int,
    process_bytes: int,
    gpu_memory_utilization: float,
    kv_cache_memory_bytes: int | None = None,
    num_gpu_blocks_override: int | None = None,
    ram_bytes: int = 0,
    hybrid_fraction: float | None = None,
) -> MemoryPlan:
    """Blocks per group. `available_bytes`: what the process may have in all; `max_chunk`: tokens of one sequence in one step
    at most. `ram_bytes`: of a tier in memory; or `hybrid_fraction`: its share of whatever there is for keys and values.
    Raises DoesNotFit, with the arithmetic, where one sequence of `max_model_len` does not fit.
    """
    layouts, source = tuple(layouts), "--gpu-memory-utilization"
    taken = weight_bytes + workspace_bytes + process_bytes + ram_bytes
    budget = max(0, math.floor(available_bytes * gpu_memory_utilization) - taken)
    if kv_cache_memory_bytes is not None:
        budget, source = kv_cache_memory_bytes, "--kv-cache-memory-bytes"
    if hybrid_fraction is not None:
        budget -= (ram_bytes := int(budget * hybrid_fraction))
    if num_gpu_blocks_override is not None:
        enough = num_gpu_blocks_override >= max(_needed(layouts, max_model_len, max_chunk))
        blocks = (num_gpu_blocks_override,) * len(layouts) if enough else None
        budget, source = num_gpu_blocks_override * sum(layout.block_bytes for layout in layouts), "--num-gpu-blocks-override"
    else:
        blocks = _split(layouts, max_model_len, max_chunk, budget)
    plan = MemoryPlan(
        layouts=layouts,
        blocks=blocks or (0,) * len(layouts),
        max_model_len=max_model_len,
        max_chunk=max_chunk,
        available_bytes=available_bytes,
        utilization=gpu_memory_utilization,
        weight_bytes=weight_bytes,
        workspace_bytes=workspace_bytes,
        process_bytes=process_bytes,
        budget_bytes=budget,
        source=source,
        ram_bytes=ram_bytes,
    )
    if blocks is None:
        raise DoesNotFit(_why_not(plan, num_gpu_blocks_override, hybrid_fraction or 0.0))
    return plan


def _needed(layouts: Sequence[BlockLayout], tokens: int, chunk: int) -> list[int]:
    """Per group, blocks that one sequence of `tokens` holds at most: the formula of admission, too."""
    return [blocks_at_most(layout.group, tokens, layout.block_size, chunk) for layout in layouts]


def _bytes(layouts: Sequence[BlockLayout], blocks: Sequence[int]) -> int:
    return sum(count * layout.block_bytes for count, layout in zip(blocks, layouts, strict=True))


def _split(layouts: Sequence[BlockLayout], max_model_len: int, chunk: int, budget: int) -> tuple[int, ...] | None:
    """Blocks per group within the budget, by the rule above; None where the least does not fit."""
    least = _needed(layouts, max_model_len, chunk)
    share = _needed(layouts, min(max_model_len, TYPICAL_TOKENS), chunk)
    if _bytes(layouts, least) > budget:
        return None

    def blocks(scale: int) -> list[int]:
        return [max(low, part * scale // 1024) for low, part in zip(least, share, strict=True)]

    low, high = 0, 1024 * (budget // _bytes(layouts, share) + 2)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _bytes(layouts, blocks(middle)) <= budget else (low, middle)
    chosen = blocks(low)
    for number, layout in enumerate(layouts):
        chosen[number] += (budget - _bytes(layouts, chosen)) // layout.block_bytes
    return tuple(chosen)


def _why_not(plan: MemoryPlan, override: int | None, fraction: float) -> str:
    """The arithmetic, and the settings any one of which would make it fit."""
    layouts, least = plan.layouts, _needed(plan.layouts, plan.max_model_len, plan.max_chunk)
    wanted = _bytes(layouts, least)
    counts = " + ".join(
        f"{counted(count, 'block')} × {counted(layout.block_bytes, 'byte')}"
        for count, layout in zip(least, layouts, strict=True)
    )
    if override is not None:
        arithmetic = f"--num-gpu-blocks-override gives {counted(override, 'block')} per group."
    elif plan.source == "--kv-cache-memory-bytes":
        below = f" beside the {plan.ram_bytes} of the tier in memory" if plan.ram_bytes else ""
        arithmetic = f"--kv-cache-memory-bytes gives {counted(plan.budget_bytes, 'byte')}{below}."
    else:
        name = "tier in memory" if fraction else "--kv-ram-bytes"
        below = f" - {name} {plan.ram_bytes}" if plan.ram_bytes else ""
        arithmetic = (
            f"{counted(plan.available_bytes, 'byte')} available × --gpu-memory-utilization {plan.utilization:g} - weights "
            f"{plan.weight_bytes} - workspace {plan.workspace_bytes} - process {plan.process_bytes}{below} "
            f"leaves {counted(plan.budget_bytes, 'byte')}."
        )
    return (
        f"One sequence of --max-model-len {counted(plan.max_model_len, 'token')} needs {counts} = "
        f"{counted(wanted, 'byte')} of keys and values. "
        f"{arithmetic} {_remedies(plan, override, fraction, least, wanted)}"
    )


def _remedies(plan: MemoryPlan, override: int | None, fraction: float, least: Sequence[int], wanted: int) -> str:
    remedies = []
    fitting = _longest(plan, override)
    if fitting:
        remedies.append(f"--max-model-len {fitting}")
    if override is not None:
        remedies.append(f"--num-gpu-blocks-override {max(least)}, or none with --kv-cache-memory-bytes {wanted}")
        return "What would work: " + "; or ".join(remedies) + "."
    whole = _whole(wanted, fraction)
    beside = plan.weight_bytes + plan.workspace_bytes + plan.process_bytes + (0 if fraction else plan.ram_bytes)
    if whole + beside <= plan.available_bytes:
        remedies.append(f"--kv-cache-memory-bytes {whole}")
    if fraction:
        smaller = math.floor((1 - wanted / max(plan.budget_bytes + plan.ram_bytes, 1)) * 1000) / 1000
        remedies += [f"--hybrid-kv-cache-fraction {smaller:g}"] if smaller > 0 else []
    if plan.source == "--gpu-memory-utilization":
        needed = whole + beside
        left = math.floor(plan.available_bytes * plan.utilization) - needed + plan.ram_bytes
        remedies += [f"--kv-ram-bytes {left}"] if left > 0 and plan.ram_bytes and not fraction else []
        share = math.ceil(needed / max(1, plan.available_bytes) * 1000) / 1000
        if share <= 1:
            remedies.append(f"--gpu-memory-utilization {share:g}")
        else:
            remedies.append(f"{counted(needed - plan.available_bytes, 'byte')} more memory with --gpu-memory-utilization 1")
    elif not fraction:
        # Blocks given outright and a share of memory exclude each other.
        remedies.append(f"--num-gpu-blocks-override {max(least)}")
    return "What would work: " + "; or ".join(remedies) + "."


def _whole(wanted: int, fraction: float) -> int:
    """Memory of which so much is left once this share of it lies below the pool."""
    whole = math.ceil(wanted / (1 - fraction))
    while (missing := wanted - (whole - int(whole * fraction))) > 0:
        whole += math.ceil(missing / (1 - fraction))
    return whole


def _longest(plan: MemoryPlan, override: int | None) -> int:
    """The longest sequence that fits; 0 where not one block does."""

    def fits(tokens: int) -> bool:
        needed = _needed(plan.layouts, tokens, plan.max_chunk)
        return max(needed) <= override if override is not None else _bytes(plan.layouts, needed) <= plan.budget_bytes

    low, high = 0, blocks_for(plan.max_model_len, plan.layouts[0].block_size) + 1
    size = plan.layouts[0].block_size
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * size) else (low, middle)
    return min(low * size, plan.max_model_len - 1)


def _window(layout: BlockLayout) -> str:
    return "full attention" if layout.group.window is None else f"window {layout.group.window}"
