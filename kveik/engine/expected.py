"""How much memory a model's weights will take, before they are loaded: as `model.decoder.load_decoder` will keep them."""

from __future__ import annotations

from pathlib import Path

from kveik.config import EngineConfig
from kveik.engine.planner import ROOT, dtype_of, estimated_weight_bytes, weight_values
from kveik.model.choice import chosen, no_blocks_because, no_kernels_because
from kveik.model.decoder import Quantization
from kveik.model.weights import ModelFile

INT8_GROUP_BYTES, INT8_GROUP = 34, 32
"""32 weights of 8 bits and their scale."""


def quantization_of(config: EngineConfig) -> Quantization:
    """Who asks for float32 asks for its precision: auto then leaves the activations alone."""
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
