"""Seams between parts that one day have several kinds on one side."""

from __future__ import annotations

import ast

from tests.tidy.sources import PACKAGE, ROOT, assert_none, nodes_of, place_of

HOST_MEMORY = ("device", "kernels", "model", "sample", "measure")
"""Folders whose tensors are in the host's memory: a device's own, what runs on it, and logits that `as_rows` brought."""


def test_nobody_else_takes_a_tensor_for_memory_of_the_host() -> None:
    assert_none(
        f"{place_of(path, node)}: .{node.attr}"
        for path in PACKAGE
        if path.relative_to(ROOT / "kveik").parts[0] not in HOST_MEMORY
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute) and node.attr in ("numpy", "data_ptr")
        # It is given a region of the host, never asks a pool for one.
        if path != ROOT / "kveik" / "machine" / "prefault.py"
    )
