"""A GGUF file as a folder in Hugging Face layout, in bfloat16: python -m benchmarks.peers.inside.export MODEL.gguf FOLDER"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    file, folder = Path(sys.argv[1]), Path(sys.argv[2])
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    model.save_pretrained(folder)


if __name__ == "__main__":
    main()
