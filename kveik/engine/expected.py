"""Expected memory of a model's weights before they are loaded, in the layout of `model.decoder.load_decoder`."""

from __future__ import annotations

from pathlib import Path

from kveik.config import EngineConfig
from kveik.engine.planner import ROOT, dtype_of, estimated_weight_bytes, weight_values
from kveik.model.choice import chosen, no_blocks_because, no_kernels_because
from kveik.model.decoder import Quantization
from kveik.model.weights import ModelFile

INT8_GROUP_BYTES, INT8_GROUP = 34, 32
"""Bytes of a group of 32 8-bit weights with its scale, and weights per group."""


def quantization_of(config: EngineConfig) -> Quantization:
    """Returns the configured quantization. With --dtype float32, auto keeps activations in full precision."""
    asked = config.model.quantization
    return "bf16" if asked == "auto" and config.model.dtype == "float32" else asked


def expected_weight_bytes(config: EngineConfig, file: ModelFile, root: Path = ROOT) -> int:
    """Returns the bytes in the layout that the decoder will choose."""
    asked, blocks = quantization_of(config), file.block_bytes
    if blocks is not None and (chosen(file).blocks if asked == "auto" else asked == "w4a8" and no_blocks_because(file) is None):
        return blocks
    if asked == "w8a8" and no_kernels_because(file) is None:
        return weight_values(file.spec) * INT8_GROUP_BYTES // INT8_GROUP
    return estimated_weight_bytes(file.spec, dtype_of(config.model.dtype, root))
