"""Arithmetic of the figures about the machine: bytes that a step reads, shares of a bound, memory of a process."""

from __future__ import annotations

import math
import os
from math import prod
from pathlib import Path

import pytest
import torch

from benchmarks.bandwidth import machine_table, of_the_bound, share_table
from benchmarks.bytes_read import bytes_per_step, file_bytes_per_step
from benchmarks.facts import environment, sentence
from benchmarks.load import healthy, load_table, memory_of, peak_of, read_status
from kveik.model.decoder import load_decoder
from kveik.model.tensors import tensor_shapes
from kveik.model.weights import open_model
from tests.model.tiny import save_gguf, tiny_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_a_step_reads_every_product_once_and_no_table_of_embeddings(tmp_path: Path, tied: bool, dtype: torch.dtype) -> None:
    path = save_gguf(tiny_model("qwen2", tie_word_embeddings=tied), tmp_path / "tiny.gguf")
    file = open_model(path)
    shapes = tensor_shapes(file.spec)
    products = sum(prod(shape) for name, shape in shapes.items() if len(shape) == 2 and not name.startswith("embed"))
    # Tied, the table is the projection, so it is read whole.
    products += prod(shapes["embed_tokens.weight"]) if tied else 0
    vectors = sum(prod(shape) for shape in shapes.values() if len(shape) == 1)
    assert file_bytes_per_step(path) == 4 * (products + vectors)
    found = bytes_per_step(load_decoder(file, dtype, "bf16"), path)
    assert dtype.itemsize * products <= found <= dtype.itemsize * (products + vectors)


def test_only_gguf_files_tell_their_bytes(tmp_path: Path) -> None:
    assert file_bytes_per_step(tmp_path) is None


def test_the_share_is_of_figures_taken_one_after_the_other() -> None:
    found = of_the_bound(1_000, [9.0, 4.0, 8.0], [10_000.0, 5_000.0, 10_000.0])
    assert found["share"] == pytest.approx(0.8)
    assert (found["tokens_per_second"], found["read_bytes_per_second"]) == (8.0, 10_000.0)


def test_tables_of_the_machine_have_a_row_for_every_count_and_model() -> None:
    bounds = {"1": {"read GB/s": 27.4, "copy GB/s": 14.0}, "2": {"read GB/s": 34.1, "copy GB/s": 18.6}}
    assert machine_table(bounds).splitlines()[2:] == ["| 1 | 27 | 14 |", "| 2 | 34 | 19 |"]
    found = {"step_bytes": 980e6, "file_bytes": None, "tokens_per_second": 31.0, "share": 0.893}
    assert share_table({"m": found}).splitlines()[2] == "| m | 980 MB | – | 31.0 | 30.4 GB | 89% |"


STATUS = """Name:	kveik
VmHWM:	  2048 kB
VmRSS:	  1024 kB
RssAnon:	   512 kB
RssFile:	   512 kB
RssShmem:	     0 kB
Threads:	3
"""


def test_the_kernels_account_of_a_process_is_read_in_bytes() -> None:
    assert read_status(STATUS) == {
        "VmHWM": 2 << 20,
        "VmRSS": 1 << 20,
        "RssAnon": 512 << 10,
        "RssFile": 512 << 10,
        "RssShmem": 0,
    }
    mine = memory_of(os.getpid())
    assert mine["VmHWM"] >= mine["VmRSS"] > 1 << 20
    assert math.isclose(mine["RssAnon"] + mine["RssFile"] + mine["RssShmem"], mine["VmRSS"], rel_tol=0.01)


def test_the_peak_is_each_figures_own() -> None:
    assert peak_of([{"a": 1, "b": 9}, {"a": 5, "b": 2}]) == {"a": 5, "b": 9}


def test_the_table_of_starts_sets_peaks_against_the_steady_state() -> None:
    peak = {"VmHWM": 300 << 20, "VmRSS": 290 << 20, "RssAnon": 150 << 20}
    steady = {"VmHWM": 300 << 20, "VmRSS": 200 << 20, "RssAnon": 100 << 20}
    start = {"ready_seconds": 2.5, "peak": peak, "steady": steady}
    rows = load_table({"smollm2-135m": {"first": start, "second": start}}).splitlines()[2:]
    assert rows[0] == "| smollm2-135m | first start | 2.5 s | 3 s | 150 MiB | 100 MiB | 1.50 | 300 MiB | 200 MiB | 1.50 |"
    assert rows[1].startswith("| smollm2-135m | second start |")


def test_nobody_is_healthy_where_nobody_listens() -> None:
    assert not healthy("http://127.0.0.1:9/health")


def test_facts_of_the_machine_make_a_sentence() -> None:
    told = sentence(environment())
    assert f"torch {torch.__version__}" in told
    assert "UTC" in told
    assert "CPUs" in told
