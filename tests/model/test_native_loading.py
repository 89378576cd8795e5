"""Weights reach the native layout without detours: parts of one product straight to their places, little memory beside."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind

from kveik.kernels import native
from kveik.kernels.native_linear import pack, pack_together

pytestmark = pytest.mark.skipif(native.module is None, reason="installed without a compiler")


@pytest.mark.parametrize("outputs", [[16, 32, 48], [16, 7], [7, 16], [5, 3, 40]])
@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q8_0, Kind.Q6_K], ids=lambda kind: kind.name)
def test_parts_packed_together_are_the_whole_packed_at_once(kind, outputs):
    """Whether parts end where a panel of 16 outputs ends or not."""
    values, size = GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (sum(outputs), 512 // values * size), np.uint8)
    whole = pack(kind.name, blocks, 512)
    parts = pack_together(kind.name, np.split(blocks, np.cumsum(outputs)[:-1]), 512)
    assert (parts.outputs, parts.inputs, parts.format) == (whole.outputs, whole.inputs, whole.format)
    np.testing.assert_array_equal(parts.bytes, whole.bytes)


LOADING = """
import sys
from pathlib import Path
import torch
from kveik.model.decoder import load_decoder
from kveik.model.weights import open_model
decoder = load_decoder(open_model(Path(sys.argv[1])), torch.bfloat16, sys.argv[2])
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(status["VmHWM"].split()[0], status["VmRSS"].split()[0])
"""


@pytest.mark.model
@pytest.mark.parametrize("quantization", ["bf16", "w8a8", "w4a8"])
def test_loading_takes_little_memory_beside_what_stays(catalogue_file, quantization):
    """In a process of its own, with everything that it has imported on either side."""
    command = [sys.executable, "-c", LOADING, str(catalogue_file("smollm2-135m")), quantization]
    peak, steady = map(int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    assert peak <= 1.3 * steady
