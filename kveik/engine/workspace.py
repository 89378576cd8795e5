"""Memory of a step beside weights and blocks, measured by running one."""

from __future__ import annotations

from pathlib import Path

import torch

from kveik.cache.layout import blocks_for
from kveik.cache.storage import BlockStorage
from kveik.engine.planner import ModelPlan, block_layouts
from kveik.kernels.attention import AttentionBatch
from kveik.kernels.kv_types import KvType
from kveik.model.batch import StepBatch
from kveik.model.decoder import Decoder

PROBE_TOKENS = 64
"""Tokens of the measured step. Its memory grows with them, so it is scaled up to a full step."""

PROBE_BLOCK_SIZE = 16


def measured_activation_bytes(decoder: Decoder, plan: ModelPlan) -> int | None:
    """Returns the peak bytes of a step of `plan.max_chunk` tokens; None where the kernel does not report them."""
    tokens = min(PROBE_TOKENS, plan.max_chunk, plan.max_model_len)
    layouts = block_layouts(decoder.spec, PROBE_BLOCK_SIZE, plan.kv_type)
    blocks = blocks_for(tokens, PROBE_BLOCK_SIZE)
    storage = BlockStorage(layouts, [blocks] * len(layouts), plan.kv_type.storage)
    batch = _batch(decoder, plan.kv_type, tokens, blocks)
    if not _reset_peak():
        return None
    before = _status_bytes("VmRSS")
    with torch.inference_mode():
        decoder.logits(decoder.forward(batch, storage.tensors))
    peak = _status_bytes("VmHWM")
    return max(0, peak - before) * -(-plan.max_chunk // tokens)


def _batch(decoder: Decoder, kv_type: KvType, tokens: int, blocks: int) -> StepBatch:
    """Returns the batch of one cold prompt of `tokens` tokens."""
    positions = torch.arange(tokens)
    groups = tuple(
        AttentionBatch(
            tables=torch.arange(blocks, dtype=torch.int32)[None],
            slots=positions.clone(),
            query_starts=torch.tensor([0, tokens], dtype=torch.int32),
            contexts=torch.tensor([tokens], dtype=torch.int32),
            decodes=0,
            block_size=PROBE_BLOCK_SIZE,
            window=group.window,
            kv_type=kv_type.of_bytes,
        )
        for group in decoder.spec.groups
    )
    return StepBatch(
        token_ids=positions % decoder.spec.vocab, positions=positions, groups=groups, wanted=torch.tensor([tokens - 1])
    )


def _reset_peak() -> bool:
    """Set VmHWM to the resident memory of now."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {name}")
