"""Names of block contents: cryptographic digests that cover everything a block's keys and values depend on.

    namespace ── H ──> key of block 0 ── H ──> key of block 1 ── H ──> …
    (model, KV dtype, layout,   ↑                    ↑
     adapter, media, tenant,    tokens [0, B)        tokens [B, 2B)
     salt)

The parent of the first block is the namespace, so whatever stands in it applies to the whole chain. Blocks that lie wholly in a
prefix that the operator has declared public (`public.py`) have the public namespace before them, without tenant and salt; the
one behind them has a digest of the last of them and of the sequence's own namespace:

    public namespace ── H ──> key of block 0 ── H ──> key of block 1 ── H(own namespace, ·) ── H ──> key of block 2 ── H ──> …
                                   everybody's                                                 this tenant's alone

Two blocks with equal keys hold equal content (SHA-256, FIPS 180-4; 256 bits); keys are the same in every process and Python
version.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from kveik.cache.layout import LayerGroup

_FORMAT = "kveik block keys 1"
"""Part of every namespace: change it when the meaning of a key or the record behind it changes."""

Part = bytes | str | int | None


def encode_parts(parts: Sequence[Part]) -> bytes:
    """Parts one after the other, each as type tag, length (8 bytes, little-endian) and bytes.

    Injective: different lists of parts give different bytes. Absence, an empty string, the string 'None', equal bytes and a
    number with the same digits all differ.
    """
    out = bytearray()
    for part in parts:
        tag, content = _tagged(part)
        out += tag + struct.pack("<Q", len(content)) + content
    return bytes(out)


def _tagged(part: Part) -> tuple[bytes, bytes]:
    if part is None:
        return b"n", b""
    if isinstance(part, bytes):
        return b"b", part
    if isinstance(part, str):
        # A JSON string may hold a lone surrogate; it is a name like any other.
        return b"s", part.encode("utf-8", "surrogatepass")
    return b"i", str(int(part)).encode("ascii")


class KeySpace:
    """What one loaded model contributes to every key: fingerprint, KV dtype, block size and layer groups."""

    def __init__(self, *, fingerprint: bytes, kv_dtype: str, block_size: int, groups: Sequence[LayerGroup]) -> None:
        parts: list[Part] = [_FORMAT, fingerprint, kv_dtype, block_size, len(groups)]
        for group in groups:
            parts += [len(group.layers), *group.layers, group.kv_heads, group.head_dim, group.window]
        self._model = hashlib.sha256(encode_parts(parts)).digest()

    def public(self, *, adapter: bytes | None = None, media: bytes | None = None) -> bytes:
        """What stands before blocks that are everybody's; no tenant, not even the nameless one, has it by itself."""
        return hashlib.sha256(encode_parts([self._model, "public", adapter, media])).digest()

    def namespace(
        self,
        *,
        tenant: bytes = b"",
        salt: str | None = None,
        adapter: bytes | None = None,
        media: bytes | None = None,
        private: str | None = None,
    ) -> bytes:
        """Digest (32 bytes) that stands before a sequence's first block.

        `adapter` is the digest of the adapter's content, never its name; `media` that of the media behind the prompt's
        placeholders. `private` keeps the blocks of one request to itself.
        """
        return hashlib.sha256(encode_parts([self._model, adapter, media, tenant, salt, private])).digest()


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Key of the block that holds `tokens` after everything that `parent` (32 bytes) stands for."""
    return hashlib.sha256(parent + struct.pack(f"<{len(tokens)}I", *tokens)).digest()


class KeyChain:
    """Keys of one sequence's full blocks, made as they are asked for; each token is hashed once."""

    __slots__ = ("_border", "_pack", "block_size", "keys", "namespace", "public", "public_blocks")

    def __init__(self, namespace: bytes, block_size: int, public: bytes = b"", public_blocks: int = 0) -> None:
        """The first `public_blocks` blocks are everybody's, in the namespace `public`; the rest is in `namespace`."""
        self.namespace = namespace
        self.block_size = block_size
        self.public = public
        self.public_blocks = public_blocks
        self.keys: list[bytes] = []
        self._border: bytes | None = None
        self._pack = struct.Struct(f"<{block_size}I").pack

    def extend(self, tokens: Sequence[int], blocks: int) -> list[bytes]:
        """All keys so far, at least those of the first `blocks` blocks of `tokens`. Token ids are integers of any kind."""
        keys, size = self.keys, self.block_size
        first, border = len(keys), self.public_blocks
        parent = self.parent(first)
        for block in range(first, blocks):
            if block == border:
                parent = self.parent(block)
            content = self._pack(*tokens[block * size : (block + 1) * size])
            parent = hashlib.sha256(parent + content).digest()
            keys.append(parent)
        return keys

    def parent(self, block: int) -> bytes:
        """What stands before block number `block`, whose predecessors' keys have been made."""
        if block == self.public_blocks:
            return self._behind_public()
        return self.keys[block - 1] if block else self.public

    def _behind_public(self) -> bytes:
        if not self.public_blocks:
            return self.namespace
        if self._border is None:
            last = self.keys[self.public_blocks - 1]
            self._border = hashlib.sha256(encode_parts(["behind a public prefix", self.namespace, last])).digest()
        return self._border
