"""The way of multiplying follows from the instruction set and the file; the same ones give the same choice."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from gguf.constants import GGMLQuantizationType as Kind

from kveik.kernels import native
from kveik.model import choice
from kveik.model.choice import Choice, choose, chosen
from kveik.model.weights import open_model
from tests.model.tiny import WIDE, save_folder, save_gguf, tiny_model


@pytest.mark.parametrize(("isa", "blocks"), [("portable", False), ("avx2", True), ("avx512", True), ("avx512_bf16", True)])
def test_every_instruction_set_has_one_quicker_way(isa: str, blocks: bool) -> None:
    assert choose(isa, None).blocks is blocks
    assert isa in choose(isa, None).why
    assert choose(isa, None) == choose(isa, None)


def test_blocks_that_no_kernel_multiplies_become_floats_and_the_reason_is_kept() -> None:
    assert choose("avx512", "the weights are of type F16") == Choice(False, "the weights are of type F16")


def test_the_choice_for_a_file_is_that_of_the_instruction_set_in_use(tmp_path: Path) -> None:
    model = tiny_model("llama", **WIDE)
    quantised = open_model(save_gguf(model, tmp_path / "tiny.gguf", {"": Kind.Q8_0}))
    if native.module is not None:
        usual = native.isa()
        try:
            for isa in native.isas():
                native.use(isa)
                assert chosen(quantised) == choose(isa, None)
        finally:
            native.use(str(usual))
    assert not chosen(open_model(save_folder(model, tmp_path / "tiny"))).blocks


def test_no_clock_decides() -> None:
    tree = ast.parse(Path(choice.__file__).read_text(encoding="utf-8"))
    imported = {
        name.name.partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
    } | {str(node.module).partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported.isdisjoint({"time", "timeit", "random"})
