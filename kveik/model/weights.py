"""Model files: the spec, the tensors under one set of names, and a fingerprint. Opening reads headers, not weights.

Two formats, one answer: `GgufModel` and `FolderModel` both hand out tensors by canonical name (transformers' names without
'model.') with one meaning: rows of queries and keys in half-rotation order, norms as the factor that is multiplied with.
"""

from __future__ import annotations

import hashlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kveik.errors import ModelBroken, Unreachable, Unsupported
from kveik.model.gguf import GgufTensor, RawTensor, raw_tensor, read_header, read_tensor
from kveik.model.spec import ModelSpec
from kveik.model.spec_config import spec_from_config
from kveik.model.spec_gguf import spec_from_gguf
from kveik.model.tensors import tensor_shapes
from kveik.words import counted

logger = logging.getLogger(__name__)

FINGERPRINT_CHUNK = 64 * 1024 * 1024
"""Bytes hashed at a time; the chunks' digests are hashed in order. Hashing releases the interpreter lock, so chunks run side
by side."""

READ_BYTES = 1 << 20
COMPARED_ROWS = 1024
INDEX = "model.safetensors.index.json"

ROPE_DIVISORS = "rope_freqs.weight"
"""Llama 3.1's frequency divisors in GGUF: what transformers keeps in rope_scaling of kind llama3."""


class ModelFile(ABC):
    """One opened model."""

    spec: ModelSpec
    metadata: Mapping[str, object] | None = None
    """GGUF keys, where the model is a GGUF file."""

    folder: Path | None = None
    """The model's folder, where it is in Hugging Face layout."""

    eos_ids: frozenset[int]

    @abstractmethod
    def read(self, name: str, into: Tensor, scales: Tensor | None = None) -> None:
        """Copy a tensor by canonical name into memory of its shape, cast to its type.

        scales: float32 [columns], multiplied with each row before it is rounded.
        """

    def raw(self, name: str) -> RawTensor | None:
        """A weight by canonical name as the file's own blocks, without a copy; None where the format has no blocks."""
        return None

    @property
    def block_bytes(self) -> int | None:
        """Bytes of all tensors as the file's own blocks; None where the format has no blocks."""
        return None

    @abstractmethod
    def rope_divisors(self) -> Tensor | None:
        """float32 [head_dim / 2] by which the full layers' rope frequencies are divided, where the file holds them."""

    @abstractmethod
    def fingerprint(self) -> bytes:
        """SHA-256 (32 bytes) over everything that the model's arithmetic depends on; reads the whole content."""


def open_model(path: Path) -> ModelFile:
    """Raises Unreachable where there is nothing, Unsupported or ModelBroken for what cannot be served; takes no memory yet."""
    if path.is_dir():
        return FolderModel(path)
    if not path.is_file():
        raise Unreachable(f"There is no model at '{path.name}': neither a folder with config.json nor a .gguf file.")
    return GgufModel(path)


class GgufModel(ModelFile):
    """One .gguf file."""

    def __init__(self, path: Path) -> None:
        header = read_header(path)
        self.path = path
        self.metadata = header.metadata
        shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
        self.spec = spec_from_gguf(header.metadata, shapes)
        self.eos_ids = _gguf_eos(header.metadata)
        self.divisors = header.tensors.pop(ROPE_DIVISORS, None)
        pairs = (self.spec.head_dim // 2,)
        if self.divisors is not None and self.divisors.shape != pairs:
            raise ModelBroken(f"The tensor '{ROPE_DIVISORS}' is {self.divisors.shape}; it must be {pairs}.")
        names = gguf_names(self.spec)
        self.tensors = {names.get(name, name): tensor for name, tensor in header.tensors.items()}
        _check_tensors(self.spec, {name: tensor.shape for name, tensor in self.tensors.items()})

    def read(self, name: str, into: Tensor, scales: Tensor | None = None) -> None:
        tensor = self.tensors[name]
        rows = self._row_order(name)
        if rows is not None and into.dim() == 1:
            # A bias is one row; its entries are in the order of the weight's rows.
            _read_rows(self.path, tensor, into[None], None)
            into[rows] = into.clone()
        else:
            _read_rows(self.path, tensor, into if into.dim() > 1 else into[None], rows, scales)

    def raw(self, name: str) -> RawTensor | None:
        rows = self._row_order(name)
        return raw_tensor(self.path, self.tensors[name], None if rows is None else rows.numpy())

    @property
    def block_bytes(self) -> int:
        return sum(tensor.size for tensor in self.tensors.values())

    def _row_order(self, name: str) -> Tensor | None:
        """The place of each row of the file, where it is not its own.

        llama.cpp rotates neighbours (2i, 2i + 1) for the llama architecture, so its converter interleaves the halves.
        """
        if self.spec.architecture != "llama" or (".q_proj." not in name and ".k_proj." not in name):
            return None
        heads = self.spec.heads if ".q_proj." in name else self.spec.kv_heads
        places = torch.arange(heads * self.spec.head_dim).view(heads, 2, self.spec.head_dim // 2)
        return places.transpose(1, 2).reshape(-1)

    def rope_divisors(self) -> Tensor | None:
        if self.divisors is None:
            return None
        divisors = torch.empty(self.divisors.shape)
        _read_rows(self.path, self.divisors, divisors[None], None)
        return divisors

    def fingerprint(self) -> bytes:
        return _fingerprint([self.path])


def _read_rows(path: Path, tensor: GgufTensor, into: Tensor, places: Tensor | None, scales: Tensor | None = None) -> None:
    """into: [rows, width]; row i of the file goes to into[places[i]]."""

    def store(first: int, rows: Tensor) -> None:
        if scales is not None:
            rows = rows.float().mul_(scales)
        if places is None:
            into[first : first + len(rows)] = rows
        else:
            into[places[first : first + len(rows)]] = rows.to(into.dtype)

    read_tensor(path, tensor, store)


def gguf_names(spec: ModelSpec) -> dict[str, str]:
    """llama.cpp's tensor names -> canonical ones."""
    names = {"token_embd.weight": "embed_tokens.weight", "output_norm.weight": "norm.weight", "output.weight": "lm_head.weight"}
    parts = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm" if spec.post_norms else "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    for layer in range(spec.layers):
        for ours, theirs in parts.items():
            for kind in ("weight", "bias"):
                names[f"blk.{layer}.{ours}.{kind}"] = f"layers.{layer}.{theirs}.{kind}"
    return names


def _gguf_eos(metadata: Mapping[str, object]) -> frozenset[int]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    return _ids(metadata.get(f"tokenizer.ggml.{key}") for key in keys)


class Stored(NamedTuple):
    """A tensor in a safetensors file."""

    path: Path
    name: str
    shape: tuple[int, ...]


class FolderModel(ModelFile):
    """A folder in Hugging Face layout: config.json and one or many safetensors files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = _json(folder / "config.json")
        self.spec = spec_from_config(config)
        generation = _json(folder / "generation_config.json") if (folder / "generation_config.json").is_file() else {}
        self.eos_ids = _ids((config.get("eos_token_id"), generation.get("eos_token_id")))
        listed = _weight_map(folder)
        self.files = sorted(set(listed.values())) if listed else [_weights_file(folder, "model.safetensors")]
        self.tensors = self._tensors(listed)
        self._settle_head()
        _check_tensors(self.spec, {name: stored.shape for name, stored in self.tensors.items()})

    def _tensors(self, listed: Mapping[str, Path]) -> dict[str, Stored]:
        """Canonical name -> where its values are. `listed`: the index's word on it, where there is an index."""
        found: dict[str, Stored] = {}
        missing = dict(listed)
        for path in self.files:
            for name, (kind, shape) in _safetensors_header(path).items():
                if listed and listed.get(name) != path:
                    # Not assigned to this file: a stale copy, or a tensor that is not part of the model.
                    continue
                missing.pop(name, None)
                canonical = name.removeprefix("model.")
                if canonical.endswith("rotary_emb.inv_freq"):
                    # Old files keep what is computed anyway.
                    continue
                if kind not in ("F32", "F16", "BF16"):
                    raise Unsupported(f"The tensor '{name[:80]}' is of type {kind}; F32, F16 and BF16 are supported.")
                if canonical in found:
                    raise ModelBroken(f"The model has the tensor '{canonical[:80]}' twice, with and without 'model.'.")
                found[canonical] = Stored(path, name, shape)
        if missing:
            places = _some([f"{name} in {path.name[:80]}" for name, path in missing.items()])
            raise ModelBroken(f"The model's index assigns {counted(len(missing), 'tensor')} to files without them: {places}.")
        return found

    def _settle_head(self) -> None:
        """A configuration may tie the output head to the embedding, and the file have both; as transformers settles it."""
        head, table = self.tensors.get("lm_head.weight"), self.tensors.get("embed_tokens.weight")
        if not self.spec.tied or head is None:
            return
        if table is None:
            self.tensors["embed_tokens.weight"] = self.tensors.pop("lm_head.weight")
        elif _equal(head, table):
            del self.tensors["lm_head.weight"]
        else:
            self.spec = replace(self.spec, tied=False)
            logger.warning(
                "config.json ties '%s' to the embedding, but the model has other values for it; these are used. "
                "Set tie_word_embeddings to false there to silence this.",
                head.name,
            )

    def read(self, name: str, into: Tensor, scales: Tensor | None = None) -> None:
        stored = self.tensors[name]
        with safe_open(stored.path, framework="pt") as file:
            tensor = file.get_tensor(stored.name)
        if self.spec.architecture == "gemma3" and name.endswith("norm.weight"):
            # Gemma multiplies with 1 + w, and only GGUF files store it so.
            tensor = tensor.float() + 1.0
        into.copy_(tensor if scales is None else tensor.float() * scales)

    def rope_divisors(self) -> Tensor | None:
        return None

    def fingerprint(self) -> bytes:
        assert self.folder is not None
        index = self.folder / INDEX
        return _fingerprint([self.folder / "config.json", *([index] if index.is_file() else []), *self.files])


def _weight_map(folder: Path) -> dict[str, Path]:
    """Tensor name -> the file that has it, as the index says; empty where there is no index."""
    index = folder / INDEX
    if not index.is_file():
        return {}
    weight_map = _json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelBroken(f"The model's {INDEX} has no weight_map.")
    files = {name: _weights_file(folder, name) for name in sorted({str(name) for name in weight_map.values()})}
    return {name: files[str(file)] for name, file in weight_map.items()}


def _weights_file(folder: Path, name: str) -> Path:
    if Path(name).name != name:
        raise ModelBroken(f"The model's index names a file outside its folder: '{name[:80]}'.")
    if not (folder / name).is_file():
        raise ModelBroken(f"The model's weights are missing: there is no {name[:80]} (only safetensors are read).")
    return folder / name


def _equal(one: Stored, other: Stored) -> bool:
    """Compares values a few rows at a time, since a table may be as large as the memory that is left."""
    if one.shape != other.shape:
        return False
    with safe_open(one.path, framework="pt") as first, safe_open(other.path, framework="pt") as second:
        ours, theirs = first.get_slice(one.name), second.get_slice(other.name)
        starts = range(0, one.shape[0], COMPARED_ROWS)
        return all(torch.equal(ours[at : at + COMPARED_ROWS], theirs[at : at + COMPARED_ROWS]) for at in starts)


def _safetensors_header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> type and shape. The library checks offsets against the file's length."""
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    except SafetensorError as error:
        raise ModelBroken(f"The weights file {path.name[:80]} is damaged or cut off ({str(error)[:80]}).") from error


def _check_tensors(spec: ModelSpec, found: Mapping[str, tuple[int, ...]]) -> None:
    """Every tensor of the spec is there in its shape, and no other."""
    if spec.layers > len(found):
        # Told before the names of all their tensors are written out.
        raise ModelBroken(
            f"The model should have {counted(spec.layers, 'layer')}; with all their tensors it holds {len(found)}."
        )
    wanted = tensor_shapes(spec)
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ModelBroken(f"The model lacks {counted(len(missing), 'tensor')}: {_some(missing)}.")
    unknown = [name for name in found if name not in wanted]
    if unknown:
        raise Unsupported(f"The model has {counted(len(unknown), 'tensor')} that the decoder does not know: {_some(unknown)}.")
    wrong = [f"{name} is {found[name]}, not {shape}" for name, shape in wanted.items() if found[name] != shape]
    if wrong:
        raise ModelBroken(f"The model has {counted(len(wrong), 'tensor')} of another shape: {_some(wrong)}.")


def _some(names: list[str]) -> str:
    return ", ".join(name[:120] for name in names[:4]) + (", ..." if len(names) > 4 else "")


def _ids(values: Iterable[object]) -> frozenset[int]:
    """Token ids given as a number, a list of numbers, or not at all."""
    ids: set[int] = set()
    for value in values:
        several = value if isinstance(value, list) else [value]
        ids.update(one for one in several if isinstance(one, int) and not isinstance(one, bool) and one >= 0)
    return frozenset(ids)


def _json(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelBroken(f"The model's folder has no {path.name}.") from None
    except (ValueError, OSError) as error:
        raise ModelBroken(f"The model's {path.name} cannot be read as JSON.") from error
    if not isinstance(content, dict):
        raise ModelBroken(f"The model's {path.name} is not a JSON object.")
    return content


def _fingerprint(paths: list[Path]) -> bytes:
    """Names do not count, the order and lengths of the files do."""
    chunks = [(path, at) for path in paths for at in range(0, max(path.stat().st_size, 1), FINGERPRINT_CHUNK)]
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.stat().st_size.to_bytes(8, "little"))
    with ThreadPoolExecutor(max_workers=min(8, torch.get_num_threads())) as pool:
        for part in pool.map(_chunk_digest, chunks):
            digest.update(part)
    return digest.digest()


def _chunk_digest(chunk: tuple[Path, int]) -> bytes:
    path, at = chunk
    # Through one small buffer: memory taken anew for every chunk costs as much as hashing it does.
    digest, buffer, left = hashlib.sha256(), memoryview(bytearray(READ_BYTES)), FINGERPRINT_CHUNK
    with path.open("rb", buffering=0) as file:
        file.seek(at)
        while left and (count := file.readinto(buffer[:left])):
            digest.update(buffer[:count])
            left -= count
    return digest.digest()
