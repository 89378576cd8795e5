"""Opening a model checks every tensor; reading one gives its canonical values; the fingerprint covers the content."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from kveik.errors import ModelBroken, Unreachable, Unsupported
from kveik.model.gguf import read_metadata
from kveik.model.tensors import tensor_shapes
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


def test_buffers_of_old_files_are_let_be(folder):
    changed_tensors(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    assert open_model(folder).spec.layers


def test_an_untied_model_without_its_projection_is_broken(tmp_path):
    folder = changed_config(save_folder(tiny_model("llama-tied"), tmp_path / "tied"), tie_word_embeddings=False)
    with pytest.raises(ModelBroken, match=r"lm_head\.weight"):
        open_model(folder)


def test_a_weights_file_cut_off_is_refused(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ModelBroken, match="damaged or cut off"):
        open_model(folder)


@pytest.fixture
def sharded(tmp_path) -> Path:
    """Two shards by hand: everything but the head, and the head; with an index."""
    folder = save_folder(tiny_model("llama"), tmp_path / "sharded")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    head = {"lm_head.weight": tensors.pop("lm_head.weight")}
    save_file(head, folder / "one.safetensors")
    save_file(tensors, folder / "two.safetensors")
    write_index(folder, {"lm_head.weight": "one.safetensors"} | dict.fromkeys(tensors, "two.safetensors"))
    return folder


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def index_of(folder: Path) -> dict[str, str]:
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


def with_more(path: Path, **more: torch.Tensor) -> None:
    save_file({**load_file(path), **more}, path)


def test_a_tensor_comes_from_the_file_that_the_index_assigns_it_to(sharded):
    """A stale copy in the other shard, which is read later, does not win; nor does what no index lists refuse the start."""
    head = load_file(sharded / "one.safetensors")["lm_head.weight"]
    with_more(sharded / "two.safetensors", **{"lm_head.weight": torch.zeros_like(head), "not.listed": torch.zeros(3)})
    with_more(sharded / "one.safetensors", **{"model.norm.weight": torch.zeros(48)})
    file = open_model(sharded)
    for name, values in (
        ("lm_head.weight", head),
        ("norm.weight", load_file(sharded / "two.safetensors")["model.norm.weight"]),
    ):
        read = torch.empty(values.shape)
        file.read(name, read)
        assert torch.equal(read, values)
        assert values.any()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"lm_head.weight": "two.safetensors"}, "assigns 1 tensor to files without them: lm_head.weight in two.safetensors."),
        ({"model.ghost": "one.safetensors"}, "assigns 1 tensor to files without them: model.ghost in one.safetensors."),
        ({"lm_head.weight": "three.safetensors"}, "there is no three.safetensors"),
        ({"lm_head.weight": None}, "lacks 1 tensor: lm_head.weight."),
        ({"norm.weight": "one.safetensors"}, "assigns 1 tensor to files without them: norm.weight in one.safetensors."),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused_by_name(sharded, changes, told):
    weight_map = {name: file for name, file in (index_of(sharded) | changes).items() if file is not None}
    write_index(sharded, weight_map)
    with pytest.raises(ModelBroken, match=re.escape(told)):
        open_model(sharded)


def test_the_index_is_part_of_the_fingerprint(sharded):
    first = open_model(sharded).fingerprint()
    with_more(
        sharded / "two.safetensors",
        **{"lm_head.weight": torch.zeros(load_file(sharded / "one.safetensors")["lm_head.weight"].shape)},
    )
    second = open_model(sharded).fingerprint()
    write_index(sharded, index_of(sharded) | {"lm_head.weight": "two.safetensors"})
    third = open_model(sharded).fingerprint()
    assert len({first, second, third}) == 3


def test_a_parameter_is_set_once(sharded):
    with_more(sharded / "one.safetensors", **{"norm.weight": torch.ones(48)})
    write_index(sharded, index_of(sharded) | {"norm.weight": "one.safetensors"})
    with pytest.raises(ModelBroken, match=r"has the tensor 'norm\.weight' twice"):
        open_model(sharded)


def test_a_head_of_its_own_under_tied_embeddings_is_used_with_one_warning_as_transformers_does(tmp_path, caplog):
    folder = save_folder(tiny_model("llama-tied"), tmp_path / "tied")
    own = torch.randn(load_file(folder / "model.safetensors")["model.embed_tokens.weight"].shape)
    changed_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": own}))
    theirs = LlamaForCausalLM.from_pretrained(folder)
    assert torch.equal(theirs.lm_head.weight, own)
    caplog.clear()
    file = open_model(folder)
    assert not file.spec.tied
    ours = load_torch_decoder(file, torch.float32, "")
    assert torch.equal(ours.projection.weight, own)
    (warning,) = caplog.records
    assert "'lm_head.weight'" in warning.getMessage()


def test_a_head_that_equals_the_table_is_tied_without_a_word(tmp_path, caplog):
    folder = save_folder(tiny_model("llama-tied"), tmp_path / "tied")

    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    assert open_model(changed_tensors(folder, add)).spec.tied
    assert caplog.records == []


def test_a_tied_model_that_has_the_head_alone_takes_it_for_the_table_as_transformers_does(tmp_path):
    folder = save_folder(tiny_model("llama-tied"), tmp_path / "tied")
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]

    def move(tensors):
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    changed_tensors(folder, move)
    theirs = LlamaForCausalLM.from_pretrained(folder)
    assert torch.equal(theirs.model.embed_tokens.weight, table)
    assert torch.equal(load_torch_decoder(open_model(folder), torch.float32, "").embedding, table)


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
