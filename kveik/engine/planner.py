"""Plan of a model on this machine: arithmetic, threads, memory; estimated from the file, then measured by a step."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from kveik.cache.layout import BlockLayout, blocks_for
from kveik.cache.memory_plan import MemoryPlan, plan_memory
from kveik.config import KV_ALIASES, CacheConfig, EngineConfig
from kveik.device.device import Device
from kveik.errors import BadValue, DoesNotFit
from kveik.kernels.attention import AttentionBatch
from kveik.kernels.kv_types import HEAD_DIM_MULTIPLE, KV_TYPES, KvType
from kveik.machine.allocator import resident_bytes
from kveik.machine.limits import ThreadPlan, bf16_support, cpu_threads, memory_available
from kveik.model.choice import chosen, no_blocks_because, no_kernels_because
from kveik.model.decoder import Decoder, Quantization
from kveik.model.spec import ModelSpec
from kveik.model.step_batch import StepBatch
from kveik.model.tensors import tensor_shapes
from kveik.model.weights import ModelFile
from kveik.offload.writer import STAGING_BYTES
from kveik.words import counted

ROOT = Path("/")
LOGITS_COPIES = 3
"""float32 copies of the logits that sampling holds at once: the logits, probabilities, and what is sorted of them."""

ACTIVATION_COPIES = 3
"""Intermediate results of a layer that are alive at once, in multiples of its widest one."""

SERVING_BYTES = 96 << 20
"""Beyond what is resident after loading: connections, requests, the prefix cache's keys, compiled products, the heap's gaps."""

VOCABULARY_BYTES = 1200
"""Per token: the tokenizer's tables."""

INT8_GROUP_BYTES, INT8_GROUP = 34, 32
"""32 weights of 8 bits and their scale."""

PROBE_TOKENS = 64
"""Tokens of the measured step. Its memory grows with them, so it is scaled up to a full step's."""

PROBE_BLOCK_SIZE = 16

DTYPES: dict[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """Arithmetic, threads and memory for one model under one configuration."""

    spec: ModelSpec
    dtype: torch.dtype
    kv_type: KvType
    max_model_len: int
    max_chunk: int
    """Tokens of one sequence in one step at most."""

    threads: ThreadPlan
    memory: MemoryPlan

    def lines(self) -> tuple[str, ...]:
        """The plan in sentences, for the start-up log and `kveik plan`."""
        spec = self.spec
        return (
            f"{spec.architecture}: {counted(spec.layers, 'layer')}, {counted(spec.heads, 'head')} over "
            f"{spec.kv_heads} of keys and values, "
            f"{counted(spec.vocab, 'token')} of vocabulary, made for {counted(spec.context, 'token')} of context",
            f"arithmetic in {dtype_name(self.dtype)}, keys and values in {self.kv_type.described}",
            self.threads.sentence,
            *self.memory.lines(),
        )


def dtype_name(dtype: torch.dtype) -> Literal["bfloat16", "float32"]:
    """As the settings spell it."""
    return "bfloat16" if dtype is torch.bfloat16 else "float32"


def plan_model(
    config: EngineConfig,
    spec: ModelSpec,
    *,
    available_bytes: int | None = None,
    weight_bytes: int | None = None,
    workspace_bytes: int | None = None,
    process_bytes: int | None = None,
    root: Path = ROOT,
) -> ModelPlan:
    """Plan with what is known: bytes that are not given are read (memory) or estimated (weights, workspace, process).

    available_bytes: what this process may have, with what it has already. process_bytes: what it has beside the weights.

    Raises `DoesNotFit`, with the arithmetic and what would work, when one sequence of the full context has no room.
    """
    dtype = dtype_of(config.model.dtype, root)
    kv_type = _kv_type(config.cache.kv_cache_dtype, dtype, spec)
    max_model_len = _context(config, spec)
    max_chunk = config.schedule.chunk_tokens_max
    if available_bytes is None:
        available_bytes = memory_for_process(root)
    if weight_bytes is None:
        weight_bytes = estimated_weight_bytes(spec, dtype)
    if workspace_bytes is None:
        workspace_bytes = estimated_workspace_bytes(config, spec, dtype, max_model_len)
    _check_weights(weight_bytes, available_bytes, config.cache.gpu_memory_utilization)
    memory = plan_memory(
        layouts=block_layouts(spec, config.cache.block_size, kv_type),
        max_model_len=max_model_len,
        max_chunk=max_chunk,
        available_bytes=available_bytes,
        weight_bytes=weight_bytes,
        workspace_bytes=workspace_bytes,
        process_bytes=_process_bytes(config, spec, process_bytes),
        gpu_memory_utilization=config.cache.gpu_memory_utilization,
        kv_cache_memory_bytes=config.cache.kv_cache_memory_bytes,
        num_gpu_blocks_override=config.cache.num_gpu_blocks_override,
        ram_bytes=config.cache.kv_ram_bytes or 0,
        hybrid_fraction=config.cache.hybrid_kv_cache_fraction,
    )
    _check_cache(memory)
    threads = cpu_threads(
        root,
        os.sched_getaffinity(0),
        threads=config.model.threads,
        omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
    )
    return ModelPlan(spec, dtype, kv_type, max_model_len, max_chunk, threads, memory)


def memory_for_process(root: Path) -> int:
    """What the machine and its control groups leave to this process, with what it has already."""
    return memory_available(root).bytes + resident_bytes()


def _process_bytes(config: EngineConfig, spec: ModelSpec, loaded: int | None) -> int:
    """The process's own share. loaded: bytes beside the weights after loading; None before, when they are estimated."""
    if loaded is None:
        loaded = resident_bytes() + spec.vocab * VOCABULARY_BYTES
    return loaded + SERVING_BYTES + _staging_bytes(config.cache)


def _staging_bytes(cache: CacheConfig) -> int:
    """Buffers in front of the tiers."""
    tiers = (cache.kv_ram_bytes or cache.hybrid_kv_cache_fraction, cache.kv_disk, cache.kv_remote)
    return STAGING_BYTES * sum(map(bool, tiers))


def dtype_of(asked: str, root: Path) -> torch.dtype:
    """The arithmetic that --dtype means on this machine."""
    if asked == "auto":
        return torch.bfloat16 if bf16_support(root).native else torch.float32
    return DTYPES[asked]


def _kv_type(asked: str, dtype: torch.dtype, spec: ModelSpec) -> KvType:
    """Raises BadValue where the type cannot hold heads of the model's size."""
    kv_type = KV_TYPES[dtype_name(dtype) if asked == "auto" else KV_ALIASES.get(asked, asked)]
    if kv_type.quantised and spec.head_dim % HEAD_DIM_MULTIPLE:
        raise BadValue(
            f"--kv-cache-dtype is {asked}, which holds heads whose size is a multiple of {HEAD_DIM_MULTIPLE}; this model's is "
            f"{spec.head_dim}. bfloat16 and float32 hold any.",
            param="kv_cache_dtype",
        )
    return kv_type


def block_layouts(spec: ModelSpec, block_size: int, kv_type: KvType) -> tuple[BlockLayout, ...]:
    """Per group of the model, what its blocks look like."""
    return tuple(BlockLayout(group, block_size, kv_type.values.itemsize, kv_type.scale_bytes) for group in spec.groups)


def _context(config: EngineConfig, spec: ModelSpec) -> int:
    asked = config.model.max_model_len
    if asked is None:
        return spec.context
    if asked > spec.context:
        raise BadValue(
            f"--max-model-len is {asked}, but the model was made for {counted(spec.context, 'token')} of context.",
            param="max_model_len",
        )
    return asked


def weight_values(spec: ModelSpec) -> int:
    """Numbers in all tensors."""
    return sum(math.prod(shape) for shape in tensor_shapes(spec).values())


def estimated_weight_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of all tensors in the target type; tied embeddings count twice where the projection keeps a packed copy."""
    values = weight_values(spec)
    if spec.tied and dtype is torch.bfloat16:
        values += spec.vocab * spec.hidden
    return values * dtype.itemsize


def quantization_of(config: EngineConfig) -> Quantization:
    """--quantization, except that auto leaves activations alone where --dtype asks for the precision of float32."""
    asked = config.model.quantization
    return "bf16" if asked == "auto" and config.model.dtype == "float32" else asked


def expected_weight_bytes(config: EngineConfig, file: ModelFile, root: Path = ROOT) -> int:
    """Bytes in the layout that the decoder will choose."""
    asked, blocks = quantization_of(config), file.block_bytes
    if blocks is not None and (chosen(file).blocks if asked == "auto" else asked == "w4a8" and no_blocks_because(file) is None):
        return blocks
    if asked == "w8a8" and no_kernels_because(file) is None:
        return weight_values(file.spec) * INT8_GROUP_BYTES // INT8_GROUP
    return estimated_weight_bytes(file.spec, dtype_of(config.model.dtype, root))


def measured_activation_bytes(device: Device, decoder: Decoder, plan: ModelPlan) -> int | None:
    """Bytes that a step of `plan.max_chunk` tokens takes at its peak; None where the system does not tell."""
    tokens = min(PROBE_TOKENS, plan.max_chunk, plan.max_model_len)
    layouts = block_layouts(decoder.spec, PROBE_BLOCK_SIZE, plan.kv_type)
    blocks = blocks_for(tokens, PROBE_BLOCK_SIZE)
    memory = device.allocate(layouts, [blocks] * len(layouts), plan.kv_type.storage)
    batch = _probe(decoder, plan.kv_type, tokens, blocks)
    with torch.inference_mode():
        peak = device.peak_bytes(lambda: decoder.logits(decoder.forward(batch, memory.tensors)))
    return None if peak is None else peak * -(-plan.max_chunk // tokens)


def _probe(decoder: Decoder, kv_type: KvType, tokens: int, blocks: int) -> StepBatch:
    """One cold prompt of `tokens` tokens."""
    positions = torch.arange(tokens)
    groups = tuple(
        AttentionBatch(
            tables=torch.arange(blocks, dtype=torch.int32)[None],
            slot_mapping=positions.clone(),
            query_start_loc=torch.tensor([0, tokens], dtype=torch.int32),
            seq_lens=torch.tensor([tokens], dtype=torch.int32),
            decodes=0,
            block_size=PROBE_BLOCK_SIZE,
            window=group.window,
            kv_type=kv_type.of_bytes,
        )
        for group in decoder.spec.groups
    )
    return StepBatch(
        token_ids=positions % decoder.spec.vocab, positions=positions, groups=groups, logits_indices=torch.tensor([tokens - 1])
    )


def estimated_workspace_bytes(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, max_model_len: int) -> int:
    """Bytes of one step's intermediate results at most: activations, gathered keys and values, logits."""
    tokens = min(config.schedule.max_num_batched_tokens, config.schedule.prefill_chunk_size + config.schedule.max_num_seqs)
    heads = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    activations = tokens * (spec.hidden * 2 + max(heads, 2 * spec.intermediate)) * dtype.itemsize * ACTIVATION_COPIES
    gathered = max_model_len * 2 * spec.kv_heads * spec.head_dim * dtype.itemsize * 2
    return activations + gathered + logits_bytes(config, spec)


def logits_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """Bytes that the logits of a full step and their sampling take."""
    return config.schedule.max_num_seqs * spec.vocab * 4 * LOGITS_COPIES


def _check_weights(weight_bytes: int, available_bytes: int, utilization: float) -> None:
    allowed = int(available_bytes * utilization)
    if weight_bytes > allowed:
        raise DoesNotFit(
            f"The weights need {counted(weight_bytes, 'byte')}; --gpu-memory-utilization {utilization:g} of the "
            f"{counted(available_bytes, 'byte')} "
            f"that can be had is {allowed}. Take a larger share, a smaller model, or fewer bits with --quantization."
        )


def _check_cache(memory: MemoryPlan) -> None:
    """A cache size that the user named outright may still be more than the machine has."""
    needed = memory.planned_bytes
    if needed > memory.available_bytes:
        room = max(0, memory.available_bytes - needed + memory.cache_bytes + memory.ram_bytes)
        below = f"a tier of {counted(memory.ram_bytes, 'byte')} in memory, " if memory.ram_bytes else ""
        may = f"{'Blocks and that tier' if below else 'Blocks'} may take {counted(room, 'byte')}{' together' if below else ''}."
        raise DoesNotFit(
            f"Blocks of {counted(memory.cache_bytes, 'byte')} ({memory.source}), {below}weights of {memory.weight_bytes}, a "
            f"workspace of {memory.workspace_bytes} and a process of {memory.process_bytes} are {counted(needed, 'byte')} "
            f"together; {memory.available_bytes} can be had. {may}"
        )
