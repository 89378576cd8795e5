"""Bytes of weights that a step of one token reads: the bound of decoding alone."""

from __future__ import annotations

from pathlib import Path

from kveik.model.decoder import Decoder
from kveik.model.gguf import read_header
from kveik.model.torch_decoder import TorchDecoder

EMBEDDING, PROJECTION = "token_embd.weight", "output.weight"


def file_bytes_per_step(file: Path) -> int | None:
    """Of a GGUF file, as its blocks lie there; None for other formats.

    Every tensor once, but for an embedding table beside a projection of its own: of it a step reads one row a token.
    """
    if not file.is_file():
        return None
    tensors = read_header(file).tensors
    read = sum(tensor.size for tensor in tensors.values())
    return read - tensors[EMBEDDING].size if PROJECTION in tensors else read


def bytes_per_step(decoder: Decoder, file: Path) -> int:
    """Of a loaded decoder: its weights, less an embedding table that is not the projection as well."""
    if isinstance(decoder, TorchDecoder):
        # A plain product uses the table itself where the two are one; a packed one has a copy in its own layout.
        shared = getattr(decoder.projection, "weight", None) is decoder.embedding
        return decoder.weight_bytes - (0 if shared else decoder.embedding.nbytes)
    # The native one keeps the file's blocks, and a table that is also the projection once.
    tensors = read_header(file).tensors if file.is_file() else {}
    return decoder.weight_bytes - (tensors[EMBEDDING].size if PROJECTION in tensors else 0)
