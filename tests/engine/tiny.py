"""A tiny random Llama with a byte-level tokenizer, as a folder on disk: the whole engine in a few megaflops."""

from __future__ import annotations

from pathlib import Path

import tokenizers
import torch
import transformers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

VOCABULARY = 260
CONTEXT = 4096
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "


def save_tiny_llama(folder: Path, *, seed: int = 0, width: int = 64, layers: int = 2, context: int = CONTEXT) -> Path:
    """config.json, model.safetensors, tokenizer.json and tokenizer_config.json. Ids 0 to 255 are bytes, 256 is the end."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 16,
        num_key_value_heads=2,
        max_position_embeddings=context,
        eos_token_id=256,
        bos_token_id=None,
        # Wide enough that the likeliest token leads by far more than rounding.
        initializer_range=0.5,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return _save_text(folder)


def save_tiny_gemma(folder: Path, *, window: int = 64, seed: int = 0) -> Path:
    """The same with Gemma's layers: the first and the third look back `window` tokens, the second at everything."""
    torch.manual_seed(seed)
    config = transformers.Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        sliding_window=window,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        eos_token_id=256,
        bos_token_id=None,
        initializer_range=0.5,
    )
    model = transformers.Gemma3ForCausalLM(config)
    # Embeddings as large as the layers' weights would outweigh all that attention adds: the answer would be the last token.
    model.model.embed_tokens.weight.data *= 0.05
    model.save_pretrained(folder)
    return _save_text(folder)


def _save_text(folder: Path) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(models.BPE(vocab={letter: token for token, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken("<end>", special=True, normalized=False)])
    transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", chat_template=TEMPLATE).save_pretrained(
        folder
    )
    return folder
