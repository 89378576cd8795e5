"""Model descriptions become specs; what the decoder does not have is refused by name."""

from __future__ import annotations

import math

import pytest

from kveik.cache.layout import LayerGroup
from kveik.errors import ModelBroken, Unsupported
from kveik.model.rope import RopeSpec
from kveik.model.spec_config import spec_from_config
from kveik.model.spec_gguf import spec_from_gguf

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}


def config(model_type: str = "llama", **changes: object) -> dict[str, object]:
    return LLAMA | {"model_type": model_type, "architectures": None} | changes


GGUF = {
    "general.architecture": "llama",
    "llama.block_count": 4,
    "llama.embedding_length": 64,
    "llama.attention.head_count": 8,
    "llama.attention.head_count_kv": 2,
    "llama.feed_forward_length": 128,
    "llama.context_length": 2048,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": 1000,
}


def metadata(architecture: str = "llama", **changes: object) -> dict[str, object]:
    """Keys under the architecture's prefix; dots are written as two underscores."""
    renamed = {key.replace("llama.", f"{architecture}."): value for key, value in GGUF.items()}
    added = {f"{architecture}.{key.replace('__', '.')}": value for key, value in changes.items()}
    return renamed | {"general.architecture": architecture} | added


@pytest.mark.parametrize(
    ("model_type", "changes", "windows"),
    [
        ("qwen2", {"use_sliding_window": False, "sliding_window": 4096}, (None,) * 4),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 4}, (None,) * 4),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 2}, (None, None, 4096, 4096)),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 0}, (4096,) * 4),
        ("qwen2", {"use_sliding_window": True, "sliding_window": None}, (None,) * 4),
        ("qwen3", {"use_sliding_window": False, "sliding_window": 4096}, (None,) * 4),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3}, (None, None, None, 7)),
        ("mistral", {"sliding_window": 8}, (8,) * 4),
        ("mistral", {"sliding_window": None}, (None,) * 4),
        ("mistral", {}, (None,) * 4),
        ("llama", {"sliding_window": 8}, (None,) * 4),
        ("gemma3_text", {"sliding_window": 9, "sliding_window_pattern": 2}, (9, None, 9, None)),
        ("gemma3_text", {"sliding_window": 9, "layer_types": ["full_attention"] * 4}, (None,) * 4),
        ("qwen2", {"sliding_window": 5, "layer_types": ["sliding_attention", *["full_attention"] * 3]}, (5, None, None, None)),
    ],
)
def test_a_window_applies_where_the_family_says_so(model_type, changes, windows):
    spec = spec_from_config(config(model_type, **changes))
    assert spec.windows == windows
    assert spec.context == 2048


def test_every_sixth_layer_of_gemma_reads_everything():
    spec = spec_from_config(config("gemma3_text", num_hidden_layers=18, sliding_window=512))
    assert [layer for layer, window in enumerate(spec.windows) if window is None] == [5, 11, 17]
    local, full = spec.groups
    assert (local.window, len(local.layers), local.layers[0]) == (512, 15, 0)
    assert full == LayerGroup(layers=(5, 11, 17), kv_heads=2, head_dim=256, window=None)


def test_layers_without_windows_are_one_group():
    (group,) = spec_from_config(config()).groups
    assert group == LayerGroup(layers=(0, 1, 2, 3), kv_heads=2, head_dim=8, window=None)


DAMAGED = [10**9, 2**63, 10**400]


@pytest.mark.parametrize("value", DAMAGED)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mistral", "qwen2"])
@pytest.mark.parametrize("key", [key for key, value in LLAMA.items() if isinstance(value, int | float)])
def test_no_number_of_a_config_is_too_large_to_be_answered(key, family, value):
    """Widths may be anything that could be; what is laid out layer by layer may not."""
    try:
        spec = spec_from_config(config(family, **{key: value, "use_sliding_window": True, "sliding_window": 8}))
    except ModelBroken as error:
        assert key != "num_hidden_layers" or f"has a 'num_hidden_layers' of {str(value)[:50]}; no model" in error.message
    else:
        assert value == 10**9 or (value < 10**30 and key in ("rms_norm_eps", "rope_theta"))
        assert key != "num_hidden_layers"
        assert len(spec.windows) == 4


@pytest.mark.parametrize("value", DAMAGED[:2])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2"])
@pytest.mark.parametrize("tensors", [None, {}, {"token_embd.weight": (1000, 64)}])
def test_no_number_of_layers_of_a_gguf_file_is_laid_out_before_it_is_believed(tensors, family, value):
    changes = {"block_count": value, "attention__sliding_window": 8}
    with pytest.raises(ModelBroken, match=rf"block_count' of {value}; no model has more than 4096"):
        spec_from_gguf(metadata(family, **changes), tensors)


@pytest.mark.parametrize(
    "nonsense",
    [
        {"rope_scaling": "yarn"},
        {"rope_parameters": [1]},
        {"partial_rotary_factor": "half"},
        {"rope_theta": math.inf},
        {"rope_theta": 10**400},
        {"rms_norm_eps": math.nan},
        {"rope_scaling": {"type": "yarn", "factor": 10**400}},
        {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 0}},
        {"original_max_position_embeddings": 0, "rope_scaling": {"type": "yarn"}},
    ],
)
def test_a_config_of_values_that_mean_nothing_is_refused(nonsense):
    with pytest.raises(ModelBroken):
        spec_from_config(config() | nonsense)


YARN = {"factor": 32.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_scaling": {"type": "yarn", **YARN}},
        {"rope_scaling": {"rope_type": "yarn", **YARN}},
        {"rope_scaling": {"rope_type": "yarn", "type": "yarn", **YARN}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, **YARN}},
        {"rope_parameters": {"full_attention": {"rope_type": "yarn", **YARN}}},
        {"rope_scaling": {"type": "yarn", **YARN}, "rope_parameters": {"rope_type": "yarn", **YARN}},
        {"rope_scaling": {"type": "yarn", "factor": 32.0}, "original_max_position_embeddings": 32768},
        {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 32768}},
    ],
)
def test_every_spelling_of_yarn_means_the_same_and_the_length_is_taken_once(spelling):
    spec = spec_from_config(config("qwen2", max_position_embeddings=1048576, **spelling))
    assert spec.context == 1048576
    assert spec.rope == RopeSpec(
        base=10000.0, kind="yarn", factor=32.0, original_context=32768, attention_factor=0.1 * math.log(32) + 1
    )


@pytest.mark.parametrize(("factor", "attention"), [(4.0, 1.1386), (32.0, 1.3466)])
def test_yarn_attention_grows_with_the_logarithm_of_the_factor(factor, attention):
    spec = spec_from_config(config(rope_scaling={"type": "yarn", "factor": factor, "original_max_position_embeddings": 512}))
    assert spec.rope.attention_factor == pytest.approx(attention, abs=5e-5)
    given = {"type": "yarn", "factor": factor, "original_max_position_embeddings": 512, "attention_factor": 1.5}
    assert spec_from_config(config(rope_scaling=given)).rope.attention_factor == 1.5


def test_an_original_length_left_out_is_the_context():
    assert spec_from_config(config(rope_scaling={"type": "yarn", "factor": 4.0})).rope.original_context == 2048


def test_no_scaling_under_any_spelling_is_the_default():
    for nothing in ({}, {"rope_scaling": None}, {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}):
        assert spec_from_config(config(**nothing)).rope == RopeSpec(base=10000.0)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "bogus", "mrope", "su"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_rope_kinds_that_we_do_not_have_are_refused_by_name(kind, key):
    with pytest.raises(Unsupported, match=f"'{kind}'"):
        spec_from_config(config(rope_scaling={key: kind, "factor": 2.0}))


@pytest.mark.parametrize(
    "contradiction",
    [
        {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
        {"rope_scaling": {"type": "linear"}},
        {"rope_scaling": {"type": "linear", "factor": "two"}},
        {"rope_scaling": {"type": "linear", "factor": math.inf}},
        {"rope_scaling": {"type": "llama3", "factor": 8.0}},
    ],
)
def test_rope_settings_that_contradict_each_other_or_lack_a_number_are_refused(contradiction):
    with pytest.raises(ModelBroken):
        spec_from_config(config(**contradiction))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gpt_oss"}, "gpt_oss"),
        ({"model_type": "mixtral", "num_local_experts": 8}, "mixture of experts"),
        ({"model_type": "qwen3_moe", "num_experts": 8}, "mixture of experts"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"hidden_act": "relu2"}, "relu2"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "SequenceClassification"),
        ({"model_type": "gemma3", "vision_config": {"depth": 2}}, "vision"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "bidirectional"),
        ({"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
    ],
)
def test_what_the_decoder_does_not_have_is_refused_by_name(changes, named):
    with pytest.raises(Unsupported, match=named):
        spec_from_config(config() | changes)


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"])
@pytest.mark.parametrize("value", [None, 0, -1, "64", 1.5, True])
def test_a_number_missing_or_impossible_is_named(key, value):
    with pytest.raises(ModelBroken, match=key):
        spec_from_config(config() | {key: value})


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ModelBroken, match="8 heads"):
        spec_from_config(config(num_key_value_heads=3))
    with pytest.raises(ModelBroken, match="layer_types"):
        spec_from_config(config(layer_types=["full_attention"]))
    with pytest.raises(ModelBroken, match="sliding_window"):
        spec_from_config(config(layer_types=["sliding_attention"] * 4, sliding_window=None))


def test_published_gemma_settings_are_understood():
    old = config("gemma3_text", rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling={"rope_type": "linear", "factor": 8.0})
    spec = spec_from_config(old | {"sliding_window": 512, "query_pre_attn_scalar": 168})
    assert spec.rope == RopeSpec(base=1e6, kind="linear", factor=8.0)
    assert spec.rope_local == RopeSpec(base=1e4)
    assert spec.attention_scale == 168**-0.5
    assert spec.embedding_scale == 8.0
    assert (spec.tied, spec.activation, spec.post_norms, spec.head_norms) == (True, "gelu_tanh", True, True)
    new = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    again = spec_from_config(config("gemma3_text", rope_parameters=new))
    assert (again.rope, again.rope_local) == (spec.rope, spec.rope_local)


def test_gguf_keys_say_the_same_as_a_config():
    from_gguf = spec_from_gguf(metadata(), {"token_embd.weight": (1000, 64), "output.weight": (1000, 64)})
    assert from_gguf == spec_from_config(config())


def test_a_gguf_file_without_an_output_matrix_is_tied_and_its_table_gives_the_vocabulary():
    spec = spec_from_gguf(metadata(), {"token_embd.weight": (1024, 64)})
    assert (spec.tied, spec.vocab) == (True, 1024)
    assert spec_from_gguf(metadata() | {"tokenizer.ggml.tokens": ["a", "b"]}).vocab == 2


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"expert_count": 8}, "mixture of experts"),
        ({"rope__scaling__type": "longrope"}, "longrope"),
        ({"rope__dimension_count": 4}, "dimension_count"),
        ({"attention__value_length": 4}, "keys and values"),
        ({"attention__head_count_kv": [2, 2, 4, 2]}, "head_count_kv"),
        ({"attention__causal": False}, "bidirectional"),
        ({"logit_scale": 0.5}, "logit_scale"),
    ],
)
def test_what_gguf_asks_for_and_the_decoder_lacks_is_refused_by_name(changes, named):
    with pytest.raises(Unsupported, match=named):
        spec_from_gguf(metadata(**changes))


def test_gguf_architectures_and_parts_that_we_do_not_have_are_refused_by_name():
    with pytest.raises(Unsupported, match="'mamba'"):
        spec_from_gguf(metadata("mamba"))
    with pytest.raises(Unsupported, match="3 parts"):
        spec_from_gguf(metadata() | {"split.count": 3})


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "context_length", "attention.layer_norm_rms_epsilon"])
@pytest.mark.parametrize("value", [None, 0, -3, "x"])
def test_a_gguf_number_missing_or_impossible_is_named(key, value):
    with pytest.raises(ModelBroken, match=f"llama.{key}"):
        spec_from_gguf(metadata() | {f"llama.{key}": value})


def test_gguf_rope_scaling_is_understood():
    yarn = metadata(rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__original_context_length=512)
    assert spec_from_gguf(yarn).rope == RopeSpec(
        base=10000.0, kind="yarn", factor=4.0, original_context=512, attention_factor=0.1 * math.log(4) + 1
    )
    linear = metadata("gemma3", rope__scaling__type="linear", rope__scaling__factor=8.0, attention__sliding_window=512)
    spec = spec_from_gguf(linear)
    assert (spec.rope.factor, spec.rope_local) == (8.0, RopeSpec(base=10000.0))


def test_gguf_windows_follow_the_family():
    assert spec_from_gguf(metadata(attention__sliding_window=9)).windows == (9,) * 4
    assert spec_from_gguf(metadata("qwen2", attention__sliding_window=9)).windows == (None,) * 4
    gemma = metadata("gemma3", attention__sliding_window=9) | {"gemma3.block_count": 7}
    assert spec_from_gguf(gemma).windows == (9, 9, 9, 9, 9, None, 9)
    pattern = gemma | {"gemma3.attention.sliding_window_pattern": [True, False, True, True, True, True, False]}
    assert spec_from_gguf(pattern).windows == (9, None, 9, 9, 9, 9, None)


def test_the_largest_gemma_scales_by_its_heads():
    big = metadata("gemma3", attention__sliding_window=9, attention__key_length=16) | {"gemma3.block_count": 62}
    assert spec_from_gguf(big).attention_scale == (64 / 8) ** -0.5
    small = metadata("gemma3", attention__sliding_window=9, attention__key_length=16)
    assert spec_from_gguf(small).attention_scale == 16**-0.5
