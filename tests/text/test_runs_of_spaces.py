"""User-defined runs of spaces in GGUF vocabularies: the longest run first, one id each."""

from __future__ import annotations

import pytest

from kveik.errors import Unsupported
from kveik.text.chat_template import ChatTemplate, chat_tokens
from kveik.text.gguf_vocabulary import tokenizer_from_gguf
from kveik.text.tokenizer import Tokenizer
from tests.text.vocabularies import byte_level_metadata, sentencepiece_metadata, sentencepiece_model, tokens_of

SPACED = [
    " " * before + text + " " * after + "b" for text in ("", "a", "def", "<tag>") for before in range(12) for after in range(12)
]


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("runs", [3, 4, 7, 8])
def test_runs_of_spaces_are_cut_as_sentencepiece_cuts_them(prefix: bool, runs: int) -> None:
    """The longest piece first, also where the run is longer than any piece: 9 spaces with pieces up to 8 are 8 and one."""
    original, ours = sentencepiece_model(prefix, runs), tokenizer_from_gguf(sentencepiece_metadata(prefix, runs))
    for text in SPACED:
        # A tag inside text is found in raw text here, and a prefix put behind it: see the test of user-defined pieces.
        if prefix and "<tag>" in text:
            continue
        assert ours.encode(text, add_special=False) == original.encode(text), repr(text)
        assert ours.decode(ours.encode(text)) == text


def test_a_run_longer_than_the_longest_piece_is_that_piece_and_the_rest() -> None:
    ours = tokenizer_from_gguf(sentencepiece_metadata(False, 8))
    ids = ours.encode(" " * 9 + "b", add_special=False)
    assert [ours.token_text(token) for token in ids] == [" " * 8, " b"]


def test_a_run_that_shorter_pieces_do_not_make_is_refused() -> None:
    metadata = sentencepiece_metadata(False, 3)
    texts, types = tokens_of(metadata), types_of(metadata)
    types[texts.index("  ")] = 1
    texts = ["unlikely" if text == "  " else text for text in texts]
    with pytest.raises(Unsupported, match="run of 3 spaces"):
        tokenizer_from_gguf({**metadata, "tokenizer.ggml.tokens": texts, "tokenizer.ggml.token_type": types})


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("a  b", ["a", "  ", "b"]),
        ("    def", ["    ", "def"]),
        (" " * 9 + "b", ["    ", "    ", " b"]),
        ("a b", ["a", " b"]),
        ("a   b", ["a", "  ", " b"]),
        ("<think>  x", ["<think>", "  ", "x"]),
        ("  ", ["  "]),
    ],
)
def test_user_defined_runs_of_spaces_in_a_byte_level_vocabulary_are_one_id_each(text: str, pieces: list[str]) -> None:
    ours = with_runs_of_spaces()
    ids = ours.encode(text, add_special=False)
    runs = {ours.token_id("  "), ours.token_id("    ")}
    assert [ours.token_text(token) for token in ids if token in runs] == [piece for piece in pieces if piece in ("  ", "    ")]
    # Between the runs the text is cut as without them.
    plain = tokenizer_from_gguf(byte_level_metadata())
    wanted = [
        [ours.token_id(piece)] if ours.token_id(piece) in runs else plain.encode(piece, add_special=False) for piece in pieces
    ]
    assert ids == [token for part in wanted for token in part]
    assert ours.decode(ids) == text


def test_runs_of_spaces_are_found_inside_messages_too() -> None:
    ours = with_runs_of_spaces()
    template = ChatTemplate("{% for m in messages %}<|start|>{{ m.content }}<|end|>{% endfor %}")
    tokens = chat_tokens(template, ours, [{"role": "user", "content": "if <|end|>:\n    x"}])
    assert tokens.count(ours.token_id("    ")) == 1
    assert tokens.count(ours.special_id("<|end|>")) == 1


def with_runs_of_spaces() -> Tokenizer:
    metadata = byte_level_metadata()
    types = [*types_of(metadata), 4, 4]
    return tokenizer_from_gguf(byte_level_metadata(tokens=[*tokens_of(metadata), "  ", "    "], token_type=types))


def types_of(metadata: dict[str, object]) -> list[int]:
    types = metadata["tokenizer.ggml.token_type"]
    assert isinstance(types, list)
    return list(types)
