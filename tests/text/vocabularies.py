"""Vocabularies for tests: real ones from the catalogue's files, and small ones trained on the spot."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from kveik.model.gguf import read_metadata
from kveik.text.gguf_vocabulary import tokenizer_from_gguf
from kveik.text.token_bytes import BYTE_LEVEL
from kveik.text.tokenizer import Tokenizer

# Whatever has broken a tokenizer somewhere: cut rules, spaces, scripts, composed characters, invisible ones, look-alikes.
NASTY = [
    "",
    " ",
    "a",
    "  leading and trailing  ",
    "can't 12345 I'LL  \n\n é 你好 😊",
    "I'M you'RE we'vE he'LL they'D it'S n't ''s 's'",
    "0 00 000 0000 00000 3.14159 1,000,000 1/2 ½ ² ③ ٣ ४ Ⅻ",
    "tabs\t\tand\r\nnewlines\n\n\n\rand\x0bmore\x0c \u2028 \u2029 \u0085",
    "   \n   \n\t\n  x",
    "word" + " " * 9 + "word" + "\n" * 7 + "word" + "\t" * 5 + "word",
    "你好，世界！ 我想在apple工作1314151天～ 日本語のテキスト ㍿ 한국어 텍스트",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇳🇴 😶‍🌫️ ☺️ 1️⃣",
    "e\u0301 é a\u0308 ä n\u0303o \u1e9b\u0323 \ufb01 \u212b o\u0302\u0323",
    "אבג שָׁלוֹם مرحبا بالعالم \u202eabc\u202c \u200f",
    "नमस्ते दुनिया ก็ไม่ កាន់តែ தமிழ்",
    "\x00NUL \x01\x02\x1b[31m \x7f \ufeffBOM \u00adsoft \u200bzero \ufffd",
    "a\u0300" * 20 + "Z̴̢̛͓a̵l̷g̶o̸",
    "<|im_start|>user\nHi<|im_end|>\n<bos><eos><start_of_turn> </s> <s> [INST] <0x41> <unk> <pad>",
    "<|endoftext|><|endoftext|> <tool_call>{}</tool_call> <table><td>x</td></table> [multimodal]",
    "def f(x):\n    return x ** 2  # comment\n\n\tif x!=y: pass;\n" * 3,
    "https://example.org/a?b=c&d=%20#x user@example.com C:\\path\\file --flag=1 $HOME `x` ~/y",
    "'''''' ``````` \"\"\"\" ......!!!!!!??????------=======",
    "\u2581already\u2581marked \u2581 Ġspelled Ċ",
    "ǅ ß ẞ ſ İ ı ŉ Straße ΣΊΣΥΦΟΣ",
    "\U0001d54f\U0001d465 \U00020000 \U000e0041 \ue000 \U000f0000 \U0010ffff",
    "x" * 2000,
    " " * 100 + "\n" * 100 + "\t" * 40 + " \n" * 40,
    "ab" * 700 + " " * 30 + "=" * 300 + "\n" * 31,
    "The quick brown fox jumps over the lazy dog. " * 20,
]

CHATML = (
    "{% for m in messages %}{{ '<|start|>' + m.role + '\\n' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)
"""A chat template in the common style, with the special tokens of the small byte-level vocabulary."""

PROSE = (
    "The yeast is kept and pitched again from batch to batch. It works hot and fast, and is never thrown away.\n"
    "Gjæren tas vare på, år etter år; den tåler 40 °C. 'It's fine', they said: \"don't worry\" - 3 parts to 100.\n"
    "def brew(hours: int) -> str:\n    return f'{hours} h'  # nothing else\n"
)


@cache
def metadata_of(path: Path) -> dict[str, object]:
    return read_metadata(path)


@cache
def real_tokenizer(path: Path) -> Tokenizer:
    return tokenizer_from_gguf(metadata_of(path))


def tokens_of(metadata: Mapping[str, object]) -> list[str]:
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    return tokens


@cache
def byte_level_core(size: int = 400) -> str:
    """A byte-level BPE trained on PROSE, as JSON: 256 byte tokens, merges, then two special tokens and a tag."""
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False, special_tokens=[])
    core.train_from_iterator([PROSE] * 3, trainer)
    core.add_special_tokens(["<|start|>", "<|end|>"])
    core.add_tokens(["<think>"])
    return core.to_str()


def byte_level_tokenizer() -> Tokenizer:
    core = tokenizers.Tokenizer.from_str(byte_level_core())
    return Tokenizer(core, BYTE_LEVEL, eos_ids=[core.token_to_id("<|end|>")])


@cache
def _token_of_byte(tokenizer: Tokenizer) -> dict[bytes, int]:
    ordinary = [token for token in range(tokenizer.vocab_size) if token not in tokenizer.special_ids]
    return {tokenizer.token_bytes(token): token for token in ordinary}


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token per byte."""
    by_byte = _token_of_byte(tokenizer)
    return [by_byte[bytes([byte])] for byte in data]


def byte_level_metadata(**keys: object) -> dict[str, object]:
    """The GGUF keys of a small byte-level vocabulary. `keys` add to or replace them; None leaves one out."""
    core = tokenizers.Tokenizer.from_str(byte_level_core())
    vocab = core.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=lambda text: vocab[text])
    types = {"<|start|>": 3, "<|end|>": 3, "<think>": 4}
    model = core.model.__getstate__()
    return _with(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [types.get(text, 1) for text in tokens],
            "tokenizer.ggml.merges": list(_merges_in(model)),
        },
        keys,
    )


def _merges_in(model: bytes) -> Iterator[str]:
    for merge in json.loads(model)["merges"]:
        yield merge if isinstance(merge, str) else " ".join(merge)


@cache
def sentencepiece_model(prefix: bool = True, runs: int = 0) -> sentencepiece.SentencePieceProcessor:
    """A SentencePiece BPE with byte fallback, two control tokens and a user-defined one, trained on PROSE.

    runs: user-defined runs of 2 spaces up to so many.
    """
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(PROSE.splitlines() * 20),
        model_writer=written,
        model_type="bpe",
        vocab_size=500,
        byte_fallback=True,
        character_coverage=0.99,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        user_defined_symbols=["<tag>", *("\u2581" * length for length in range(2, runs + 1))],
        control_symbols=["<turn>"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())


def sentencepiece_metadata(prefix: bool = True, runs: int = 0, **keys: object) -> dict[str, object]:
    """The GGUF keys that a converter writes for `sentencepiece_model`."""
    model = sentencepiece_model(prefix, runs)
    ids = range(model.get_piece_size())
    types = [
        2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 5 if model.is_unused(i) else 1
        for i in ids
    ]
    types[model.piece_to_id("<tag>")] = 4
    spaces = {model.piece_to_id("\u2581" * length): " " * length for length in range(2, runs + 1)}
    for token in spaces:
        types[token] = 4
    return _with(
        {
            "tokenizer.ggml.model": "llama",
            # Converters write such runs with real spaces.
            "tokenizer.ggml.tokens": [spaces.get(i, model.id_to_piece(i)) for i in ids],
            "tokenizer.ggml.scores": [model.get_score(i) for i in ids],
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.bos_token_id": model.bos_id(),
            "tokenizer.ggml.eos_token_id": model.eos_id(),
            "tokenizer.ggml.unknown_token_id": model.unk_id(),
            "tokenizer.ggml.add_space_prefix": prefix,
        },
        keys,
    )


def _with(metadata: dict[str, object], keys: Mapping[str, object]) -> dict[str, object]:
    metadata |= {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
    return {key: value for key, value in metadata.items() if value is not None}
