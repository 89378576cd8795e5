"""OpenVINO GenAI: how it is had and started."""

from __future__ import annotations

from pathlib import Path

from benchmarks.peers.install import environment
from benchmarks.peers.side import Resident, Side

PINS = ("openvino-genai==2026.4.1.0", "openvino==2026.4.1", "openvino-tokenizers==2026.4.1.0", "numpy==2.4.6")


class OpenVino:
    """OpenVINO GenAI as it is had: 300 MB."""

    name = "OpenVINO"

    def install(self, home: Path) -> None:
        """Its packages into an environment of their own."""
        environment(home / "openvino", [PINS])

    def side(self, home: Path, model: Path, threads: int) -> Side:
        python = home / "openvino" / "venv" / "bin" / "python"
        command = [str(python), "-m", "benchmarks.peers.inside.openvino_engine", str(model), str(threads)]
        return Resident(self.name, command, {}, home / "openvino" / "run.log")
