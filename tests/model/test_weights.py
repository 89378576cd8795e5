"""Opening a model checks every tensor; reading one gives its canonical values; the fingerprint covers the content."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kveik.errors import ModelBroken, Unreachable, Unsupported
from kveik.model.gguf import read_metadata
from kveik.model.spec import tensor_shapes
from kveik.model.torch_decoder import load_torch_decoder
from kveik.model.weights import open_model
from tests.model.tiny import save_folder, save_gguf, tiny_model


@pytest.fixture
def folder(tmp_path) -> Path:
    return save_folder(tiny_model("llama"), tmp_path / "model")


def changed_config(folder: Path, **changes: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def changed_tensors(folder: Path, change) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("family", ["llama-biased", "llama-tied", "mistral", "qwen2", "qwen3", "gemma3"])
def test_both_formats_give_the_same_tensors(tmp_path, family):
    model = tiny_model(family)
    folder, file = open_model(save_folder(model, tmp_path / "folder")), open_model(save_gguf(model, tmp_path / "m.gguf"))
    for name, shape in tensor_shapes(folder.spec).items():
        one, other = torch.empty(shape), torch.empty(shape)
        folder.read(name, one)
        file.read(name, other)
        torch.testing.assert_close(one, other, rtol=0, atol=2e-7, msg=name)


def test_norm_weights_that_only_gemma_stores_without_their_one_are_read_as_factors(tmp_path):
    for family, offset in (("gemma3", 1.0), ("llama", 0.0)):
        model = tiny_model(family)
        file = open_model(save_folder(model, tmp_path / family))
        stored = model.state_dict()
        for name in tensor_shapes(file.spec):
            if "norm" in name:
                into = torch.empty(stored["model." + name].shape)
                file.read(name, into)
                torch.testing.assert_close(into, stored["model." + name] + offset)


def test_columns_are_scaled_before_rounding(folder):
    file, scales = open_model(folder), torch.linspace(0.3, 3, 48)
    plain, scaled = torch.empty(80, 48), torch.empty(80, 48, dtype=torch.bfloat16)
    file.read("layers.1.mlp.up_proj.weight", plain)
    file.read("layers.1.mlp.up_proj.weight", scaled, scales)
    torch.testing.assert_close(scaled, (plain * scales).bfloat16(), rtol=0, atol=0)


def test_sharded_weights_are_one_model(folder, tmp_path):
    sharded = save_folder(tiny_model("llama"), tmp_path / "sharded", max_shard_size="20KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    whole, parts = (load_torch_decoder(open_model(path), torch.float32, "") for path in (folder, sharded))
    assert torch.equal(whole.embedding, parts.embedding)
    assert torch.equal(whole.layers[2].feed_forward.down.weight, parts.layers[2].feed_forward.down.weight)


def test_missing_tensors_are_named(folder):
    changed_tensors(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelBroken, match=r"lacks 1 tensor: layers\.1\.mlp\.up_proj\.weight"):
        open_model(folder)


def test_more_layers_than_tensors_are_told_as_such(folder):
    changed_config(folder, num_hidden_layers=4000)
    with pytest.raises(ModelBroken, match=r"should have 4000 layers; with all their tensors it holds \d+\."):
        open_model(folder)


def test_unknown_tensors_are_named_and_refused(folder, tmp_path):
    changed_tensors(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.sinks": torch.zeros(6)}))
    with pytest.raises(Unsupported, match=r"layers\.0\.self_attn\.sinks"):
        open_model(folder)


def test_tensors_of_another_shape_are_named_with_both_shapes(folder):
    changed_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(47)}))
    with pytest.raises(ModelBroken, match=r"norm\.weight is \(47,\), not \(48,\)"):
        open_model(folder)


def test_a_tensor_of_a_type_we_do_not_read_is_named(folder):
    changed_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(48, dtype=torch.int8)}))
    with pytest.raises(Unsupported, match=r"model\.norm\.weight' is of type I8"):
        open_model(folder)


def test_buffers_of_old_files_and_a_second_copy_of_a_tied_table_are_let_be(tmp_path):
    folder = save_folder(tiny_model("llama-tied"), tmp_path / "tied")

    def add(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    assert open_model(changed_tensors(folder, add)).spec.tied


def test_an_untied_model_without_its_projection_is_broken(tmp_path):
    folder = changed_config(save_folder(tiny_model("llama-tied"), tmp_path / "tied"), tie_word_embeddings=False)
    with pytest.raises(ModelBroken, match=r"lm_head\.weight"):
        open_model(folder)


def test_a_weights_file_cut_off_is_refused(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ModelBroken, match="damaged or cut off"):
        open_model(folder)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "sub/model.safetensors"])
def test_an_index_cannot_name_files_outside_the_folder(folder, name):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(ModelBroken, match="outside its folder"):
        open_model(folder)


@pytest.mark.parametrize("content", ["", "[]", "{", '"x"'])
def test_a_config_that_is_no_object_is_refused(folder, content):
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelBroken, match=r"config\.json"):
        open_model(folder)


def test_what_is_not_there_is_said_without_a_path(tmp_path):
    with pytest.raises(Unreachable) as refused:
        open_model(tmp_path / "nothing.gguf")
    assert str(tmp_path) not in refused.value.message
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelBroken, match=r"no config\.json"):
        open_model(tmp_path / "empty")
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"x")
    changed = save_folder(tiny_model("llama"), tmp_path / "pickled")
    (changed / "model.safetensors").unlink()
    with pytest.raises(ModelBroken, match="only safetensors are read"):
        open_model(changed)


def test_end_tokens_are_the_union_of_both_configs(folder):
    changed_config(folder, eos_token_id=7)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert open_model(folder).eos_ids == {7, 9}
    changed_config(folder, eos_token_id=None)
    (folder / "generation_config.json").unlink()
    assert open_model(folder).eos_ids == frozenset()


def test_a_gguf_files_end_tokens_and_metadata_come_along(tmp_path):
    path = save_gguf(tiny_model("qwen2"), tmp_path / "m.gguf")
    file = open_model(path)
    assert file.eos_ids == {2}
    assert file.metadata == read_metadata(path)
    assert (file.folder, open_model(save_folder(tiny_model("qwen2"), tmp_path / "f")).folder) == (None, tmp_path / "f")


def test_a_fingerprint_is_the_same_for_the_same_content_and_other_for_any_other(folder, tmp_path):
    first = open_model(folder).fingerprint()
    assert len(first) == 32
    assert open_model(save_folder(tiny_model("llama"), tmp_path / "twin")).fingerprint() == first
    assert open_model(save_folder(tiny_model("llama", seed=1), tmp_path / "other")).fingerprint() != first
    assert open_model(changed_config(folder, rope_theta=5000.0)).fingerprint() != first


def test_one_bit_of_a_weight_changes_the_fingerprint_of_a_gguf_file(tmp_path, monkeypatch):
    path = save_gguf(tiny_model("llama"), tmp_path / "m.gguf")
    monkeypatch.setattr("kveik.model.weights.FINGERPRINT_CHUNK", 5000)
    first = open_model(path).fingerprint()
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    assert open_model(path).fingerprint() != first


def test_rows_of_a_quantised_llama_are_put_back_in_order(tmp_path):
    """A chunk's worth of rows at a time, so the order must hold across chunks."""
    model = tiny_model("llama")
    file = open_model(save_gguf(model, tmp_path / "m.gguf"))
    stored = model.state_dict()["model.layers.0.self_attn.q_proj.weight"]
    into = torch.empty(stored.shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kveik.model.gguf.CHUNK_VALUES", 48 * 7)
        file.read("layers.0.self_attn.q_proj.weight", into)
    np.testing.assert_array_equal(into.numpy(), stored.numpy())
