"""A weight's blocks as the file holds them: the file's own bytes, in canonical order, and together only where types agree."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from kveik.model.gguf import runs
from kveik.model.tensors import tensor_shapes
from kveik.model.weights import open_model
from tests.model.tiny import WIDE, save_folder, save_gguf, tiny_model

KINDS = {"v_proj": Kind.Q8_0, "_proj": Kind.Q4_1, "embed": Kind.Q5_0}
LAYER = "layers.1.self_attn."


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def path(request, tmp_path_factory) -> Path:
    """llama's queries and keys lie in another order in the file, qwen2's do not."""
    return save_gguf(tiny_model(request.param, **WIDE), tmp_path_factory.mktemp("raw") / "m.gguf", KINDS)


def test_the_blocks_hold_what_reading_gives(path):
    file = open_model(path)
    for name, shape in tensor_shapes(file.spec).items():
        if len(shape) < 2:
            continue
        raw, values = file.raw(name), torch.empty(shape)
        file.read(name, values)
        assert raw is not None
        assert raw.shape == shape
        np.testing.assert_array_equal(dequantize(raw.blocks, raw.kind), values.numpy(), err_msg=name)


def test_blocks_are_the_files_own_pages_and_cannot_be_written(path):
    raw = open_model(path).raw("layers.0.mlp.down_proj.weight")
    assert raw is not None
    assert isinstance(raw.blocks, np.memmap)
    assert raw.blocks.flags.c_contiguous
    assert bytes(raw.blocks) in path.read_bytes()
    for name in ("mlp.down_proj", "self_attn.q_proj"):
        raw = open_model(path).raw(f"layers.0.{name}.weight")
        assert raw is not None
        with pytest.raises(ValueError, match="read-only"):
            raw.blocks[0, 0] = 1


def test_neighbours_of_one_type_are_a_run_and_others_stay_apart(path):
    file = open_model(path)
    parts = [file.raw(f"{LAYER}{part}_proj.weight") for part in "qkv"]
    assert all(part is not None for part in parts)
    assert runs([part for part in parts if part is not None]) == [parts[:2], parts[2:]]
    assert [part.kind for part in parts if part is not None] == [Kind.Q4_1, Kind.Q4_1, Kind.Q8_0]
    assert runs([]) == []


def test_a_folder_has_no_blocks(tmp_path):
    assert open_model(save_folder(tiny_model("llama"), tmp_path / "m")).raw("layers.0.mlp.up_proj.weight") is None
