"""A GGUF file as a folder in Hugging Face layout, in bfloat16: python -m benchmarks.peers.inside.export MODEL.gguf FOLDER

The description is what transformers reads from the file, the weights are what kveik does.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from kveik.model.tensors import tensor_shapes
from kveik.model.weights import open_model


def main() -> None:
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    file = open_model(source)
    tensors = {}
    for name, shape in tensor_shapes(file.spec).items():
        tensor = torch.empty(shape, dtype=torch.bfloat16)
        file.read(name, tensor)
        tensors[name if name.startswith("lm_head") else f"model.{name}"] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    config.architectures = [f"{file.spec.architecture.capitalize()}ForCausalLM"]
    config.dtype = "bfloat16"
    # Last: a folder counts as whole once it has its description.
    config.save_pretrained(folder)


if __name__ == "__main__":
    main()
