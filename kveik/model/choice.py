"""Choice between a file's own blocks and floats, from what is known of kernels and instruction sets."""

from __future__ import annotations

from dataclasses import dataclass

from kveik.kernels import native
from kveik.kernels.native_attention import HEAD_DIM_MOST, HEAD_DIM_STEP
from kveik.kernels.native_linear import FORMATS, GROUP
from kveik.model.weights import ModelFile
from kveik.words import counted

SLOW_ISAS = frozenset({"portable"})
"""Instruction sets of the native kernels under which floats are quicker for prompts and batches."""


def no_kernels_because(file: ModelFile) -> str | None:
    """Why the native kernels cannot run the model, whatever its weights; None where they can."""
    spec = file.spec
    if native.module is None:
        return "the native kernels are not installed"
    odd = [width for width in (spec.hidden, spec.intermediate, spec.heads * spec.head_dim) if width % GROUP]
    if odd:
        return f"the model has products over {counted(odd[0], 'input')}, which is no multiple of {GROUP}"
    if spec.head_dim % HEAD_DIM_STEP:
        return f"the model's heads have {counted(spec.head_dim, 'dimension')}, which is no multiple of {HEAD_DIM_STEP}"
    if spec.head_dim > HEAD_DIM_MOST:
        return f"the model's heads have {counted(spec.head_dim, 'dimension')}; the native kernels take {HEAD_DIM_MOST} at most"
    return None


def no_blocks_because(file: ModelFile) -> str | None:
    """Why the file's own blocks cannot be multiplied; None where they can."""
    raw = file.raw(_product(file))
    if raw is None:
        return "the model is a folder, whose weights are not quantised"
    if raw.kind.name not in FORMATS:
        return f"the weights are of type {raw.kind.name}, which the native kernels do not multiply"
    return no_kernels_because(file)


@dataclass(frozen=True, slots=True)
class Choice:
    """A way of multiplying, and the reason for it."""

    blocks: bool
    """The file's own blocks times int8 activations, else floats."""

    why: str


def choose(isa: str | None, refused: str | None) -> Choice:
    """The quicker way under an instruction set. refused: why the file's blocks cannot be multiplied, None where they can.

    Known from measurements of every instruction set (docs/PERFORMANCE.md, "Two ways of multiplying"): no clock decides.
    """
    if refused is not None:
        return Choice(False, refused)
    if isa in SLOW_ISAS:
        return Choice(False, f"blocks are slower than floats with the native kernels for {isa}")
    return Choice(True, f"the quicker way with the native kernels for {isa}")


def chosen(file: ModelFile) -> Choice:
    """The choice for a file under the instruction set in use."""
    return choose(native.isa(), no_blocks_because(file))


def _product(file: ModelFile) -> str:
    return f"layers.{file.spec.layers // 2}.mlp.gate_proj.weight"
