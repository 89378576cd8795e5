"""GGUF headers are read as the gguf package reads them; a file that lies about itself is refused with a sentence."""

from __future__ import annotations

import struct
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize

from kveik.errors import ModelBroken, Unsupported
from kveik.model.gguf import SUPPORTED, read_header, read_metadata, read_tensor
from tests.seeds import over_seeds

Kind = GGMLQuantizationType


def written(path: Path, tensors: dict[str, tuple[np.ndarray, Kind | None]], alignment: int = 32, **keys: object) -> Path:
    """A file with these tensors (packed bytes where a kind is given) and keys."""
    writer = GGUFWriter(path, "llama")
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    for key, value in keys.items():
        writer.add_key_value(key, value, *_type_of(value))
    for name, (values, kind) in tensors.items():
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _type_of(value: object):
    if isinstance(value, list):
        return GGUFValueType.ARRAY, GGUFValueType.get_type(value[0])
    return (GGUFValueType.get_type(value),)


def packed(kind: Kind, rows: int, width: int, seed: int = 0) -> np.ndarray:
    """Random blocks of a kind. Scales are made small halves, so that no value overflows."""
    block, size = GGML_QUANT_SIZES[kind]
    chance = np.random.default_rng(seed)
    if kind in (Kind.F32, Kind.F16):
        return chance.standard_normal((rows, width)).astype(np.float32 if kind == Kind.F32 else np.float16)
    if kind == Kind.BF16:
        return torch.from_numpy(chance.standard_normal((rows, width))).bfloat16().view(torch.uint8).numpy()
    content = chance.integers(0, 256, (rows * width // block, size)).astype(np.uint8)
    # Every two bytes that may be a half-precision scale get an exponent that is neither infinite nor NaN.
    halves = {Kind.Q6_K: [208], Kind.Q3_K: [108], Kind.Q2_K: [80, 82]}.get(kind, [0, 2])
    for at in halves:
        content[:, at + 1] &= 0xBB
    return content.reshape(rows, -1)


def read(path: Path, name: str) -> torch.Tensor:
    tensor = read_header(path).tensors[name]
    into = torch.full(tensor.shape, torch.nan)
    rows = into if into.dim() > 1 else into[None]

    def store(first: int, part: torch.Tensor) -> None:
        rows[first : first + len(part)] = part

    read_tensor(path, tensor, store)
    return into


@pytest.mark.parametrize("kind", sorted(SUPPORTED), ids=lambda kind: kind.name)
@pytest.mark.parametrize("rows", [1, 5, 1100])
def test_every_supported_type_gives_the_packages_values_bit_for_bit(tmp_path, kind, rows):
    content = packed(kind, rows, 512, seed=rows)
    path = written(tmp_path / "model.gguf", {"matrix": (content, None if kind in (Kind.F32, Kind.F16) else kind)})
    right = dequantize(content, kind)
    assert np.isfinite(right).all()
    assert len(np.unique(right)) > 10
    np.testing.assert_array_equal(read(path, "matrix").numpy().view(np.uint32), right.reshape(rows, 512).view(np.uint32))


def test_the_supported_types_are_these():
    names = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS"
    assert {kind.name for kind in SUPPORTED} == set(names.split())


def test_metadata_comes_as_plain_values(tmp_path):
    keys = {"a.text": "é 你好", "a.whole": -3, "a.real": 0.5, "a.flag": True, "a.list": ["x", "", "yz"], "a.numbers": [1, 2, 3]}
    path = written(tmp_path / "model.gguf", {"m": (np.zeros((2, 4), np.float32), None)}, **keys)
    found = read_metadata(path)
    assert {key: found[key] for key in keys} == keys
    assert type(found["a.flag"]) is bool


@pytest.mark.model
@pytest.mark.parametrize("model", ["smollm2-135m", pytest.param("gemma-3-270m", marks=pytest.mark.slow)])
def test_a_real_files_header_is_the_packages(catalogue_file, model):
    path = catalogue_file(model)
    header, reader = read_header(path), GGUFReader(path)
    assert {name: (t.shape, t.offset, t.size) for name, t in header.tensors.items()} == {
        t.name: (tuple(reversed(t.shape.tolist())), t.data_offset, t.n_bytes) for t in reader.tensors
    }
    for key, value in header.metadata.items():
        if not isinstance(value, list) or len(value) < 1000:
            assert value == reader.fields[key].contents(), key
    tokens = header.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    assert tokens[300:310] == [reader.fields["tokenizer.ggml.tokens"].contents(index) for index in range(300, 310)]


def test_a_large_alignment_is_followed(tmp_path):
    values = np.arange(40, dtype=np.float32).reshape(8, 5)
    path = written(tmp_path / "model.gguf", {"a": (values, None), "b": (values * 2, None)}, alignment=4096)
    assert read_header(path).tensors["b"].offset % 4096 == 0
    np.testing.assert_array_equal(read(path, "b").numpy(), values * 2)


def test_a_vector_is_read_as_one_row(tmp_path):
    path = written(tmp_path / "model.gguf", {"norm": (np.arange(7, dtype=np.float32), None)})
    assert read(path, "norm").tolist() == [0, 1, 2, 3, 4, 5, 6]


class Header:
    """A header written byte by byte, for what no writer would write."""

    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.tensors: list[bytes] = []
        self.version = 3

    @staticmethod
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def key(self, name: str, kind: int, content: bytes) -> Header:
        self.keys.append(self.text(name) + struct.pack("<I", kind) + content)
        return self

    def tensor(self, name: str, dimensions: tuple[int, ...], kind: int, offset: int = 0) -> Header:
        head = self.text(name) + struct.pack("<I", len(dimensions))
        self.tensors.append(head + struct.pack(f"<{len(dimensions)}QIQ", *dimensions, kind, offset))
        return self

    def save(self, path: Path, content: int = 0) -> Path:
        counts = struct.pack("<IQQ", self.version, len(self.tensors), len(self.keys))
        head = b"GGUF" + counts + b"".join(self.keys) + b"".join(self.tensors)
        path.write_bytes(head + bytes(-len(head) % 32) + bytes(content))
        return path


def test_the_hand_written_header_is_right_where_it_means_to_be(tmp_path):
    path = Header().tensor("m", (4, 2), Kind.F32).save(tmp_path / "model.gguf", content=32)
    assert prod(read_header(path).tensors["m"].shape) == 8


@pytest.mark.parametrize(("kind", "named"), [(39, "MXFP4"), (255, "type 255"), (16, "IQ2_XXS"), (24, "I8"), (4, "type 4")])
def test_an_unsupported_type_is_refused_by_tensor_and_type(tmp_path, kind, named):
    header = Header().tensor("good", (32,), Kind.F32).tensor("blk.0.ffn_up.weight", (256, 8), kind, 128)
    path = header.save(tmp_path / "m.gguf", 64)
    with pytest.raises(Unsupported, match=rf"blk\.0\.ffn_up\.weight \({named}\)"):
        read_header(path)


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q4_0, Kind.IQ4_XS])
def test_rows_that_are_no_whole_blocks_are_refused(tmp_path, kind):
    with pytest.raises(ModelBroken, match=r"rows of 250"):
        read_header(Header().tensor("m", (250, 4), kind).save(tmp_path / "m.gguf", 4096))


def test_a_file_cut_off_in_its_tensors_is_refused_by_offsets(tmp_path):
    path = written(tmp_path / "m.gguf", {"a": (np.zeros((8, 8), np.float32), None), "b": (np.zeros((8, 8), np.float32), None)})
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelBroken, match=r"cut off: the tensor 'b' ends at byte \d+"):
        read_header(path)


def test_a_file_cut_off_anywhere_in_its_header_is_refused(tmp_path):
    values = (np.zeros((2, 4), np.float32), None)
    whole = written(tmp_path / "m.gguf", {"m": values}, **{"a.list": ["x", "yz"], "a.ints": [1, 2], "a.f": 0.5}).read_bytes()
    for length in range(len(whole)):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises((ModelBroken, Unsupported)):
            read_header(tmp_path / "cut.gguf")


@over_seeds(300)
def test_a_damaged_header_is_refused_or_read_and_never_crashes(tmp_path, seed):
    values = (np.zeros((2, 4), np.float32), None)
    path = written(tmp_path / "m.gguf", {"m": values, "n": values}, **{"a.list": ["x", "yz"], "a.ints": [1, 2], "a.f": 0.5})
    content, chance = bytearray(path.read_bytes()), np.random.default_rng(seed)
    for _ in range(chance.integers(1, 4)):
        content[chance.integers(0, len(content) - 64)] = chance.integers(0, 256)
    path.write_bytes(content)
    try:
        header = read_header(path)
    except (ModelBroken, Unsupported):
        return
    for tensor in header.tensors.values():
        assert tensor.offset + tensor.size <= len(content)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Header().key("a", 9, struct.pack("<IQ", 4, 1 << 60)), "ends inside its header"),
        (lambda: Header().key("a", 9, struct.pack("<IQ", 8, 1 << 60)), "cannot fit"),
        (lambda: Header().key("a", 9, struct.pack("<IQ", 9, 1 << 60)), "cannot fit"),
        (lambda: Header().key("a", 8, struct.pack("<Q", 1 << 63)), "ends inside its header"),
        (lambda: Header().key("a", 77, b"1234"), "unknown type 77"),
        (lambda: Header().key("a", 7, b"\1").key("a", 7, b"\1"), "'a' twice"),
        (lambda: Header().key("general.alignment", 4, struct.pack("<I", 0)), "power of two"),
        (lambda: Header().key("general.alignment", 4, struct.pack("<I", 48)), "power of two"),
        (lambda: Header().key("general.alignment", 8, Header.text("32")), "power of two"),
        (lambda: Header().tensor("m", (4,), Kind.F32).tensor("m", (4,), Kind.F32, 32), "'m' twice"),
        (lambda: Header().tensor("m", (), Kind.F32), "0 dimensions"),
        (lambda: Header().tensor("m", (1, 1, 1, 1, 1), Kind.F32), "5 dimensions"),
        (lambda: Header().tensor("m", (0, 4), Kind.F32), "rows of 0"),
        (lambda: Header().tensor("m", (4,), Kind.F32, 7), "offset 7"),
        (lambda: Header().tensor("m", (1 << 62, 1 << 62), Kind.F32), "cut off"),
        (lambda: Header().tensor("m", (4,), Kind.F32, 1 << 63), "cut off"),
    ],
)
def test_a_header_that_lies_is_refused_with_what_is_wrong(tmp_path, make, named):
    with pytest.raises(ModelBroken, match=named):
        read_header(make().save(tmp_path / "m.gguf", 64))


def test_arrays_nested_without_end_are_refused(tmp_path):
    nested = struct.pack("<IQ", 9, 1) * 200
    with pytest.raises(Unsupported, match="nests"):
        read_header(Header().key("a", 9, nested).save(tmp_path / "m.gguf", 64))


@pytest.mark.parametrize("version", [1, 4, 3 << 24])
def test_other_versions_and_big_endian_files_are_refused(tmp_path, version):
    header = Header()
    header.version = version
    with pytest.raises(Unsupported, match="version"):
        read_header(header.save(tmp_path / "m.gguf"))


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\3\4 something else entirely"])
def test_what_is_no_gguf_file_is_refused(tmp_path, content):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ModelBroken):
        read_header(tmp_path / "m.gguf")
