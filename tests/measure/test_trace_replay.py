"""Traces are read as published, and what is none is refused with its line."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from kveik.errors import BadValue, Unreachable
from kveik.measure.replay import Policy, ReplaySetting, read_trace, replay

TRACES = Path(__file__).parents[1] / "traces"
TRACE, CONVERSATION = TRACES / "synthetic_700.jsonl.gz", TRACES / "conversation_1200.jsonl.gz"
LINE = '{"timestamp": 1500, "input_length": 1030, "output_length": 7, "hash_ids": [3, 4, 9]}\n'


def test_a_line_is_a_request_whose_last_block_may_be_partial(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(LINE + "\n" + LINE)
    (one, again) = read_trace(path)
    assert (one.came, one.full, one.tokens_out, len(one.keys), len(set(one.keys))) == (1.5, 2, 7, 3, 3)
    assert one == again


def test_packed_traces_are_read_too(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(LINE.encode()))
    assert len(read_trace(path)) == 1


@pytest.mark.parametrize(
    "line", ["[]", "nonsense", '{"timestamp": 1}', LINE.replace("[3, 4, 9]", '["x"]'), LINE.replace("3,", "-3,")]
)
def test_what_is_no_request_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(LINE + line)
    with pytest.raises(BadValue, match="Line 2"):
        read_trace(path)


@pytest.mark.parametrize(
    ("good", "bad", "what"),
    [
        ("1500", "NaN", "timestamp NaN"),
        ("1500", "1e400", "timestamp Infinity"),
        ("1500", '"1500"', "timestamp"),
        ("1030", "1e30", "input_length 1e[+]30"),
        ("1030", "-1", "input_length -1"),
        ("7", "-7", "output_length -7"),
        ("7", "true", "output_length true"),
        ("[3, 4, 9]", "7", "hash_ids 7"),
        ("9]", f"{1 << 128}]", "340282366920938463463374607431768211456 among its hash_ids"),
        ("9]", "1.5]", "1.5 among its hash_ids"),
        ("[3, 4, 9]", "[5, 4]", "id 4 behind 5, and it was behind 3 before"),
        ("[3, 4, 9]", "[9, 3]", "id 9 the first, and it was behind 4 before"),
        ("[3, 4, 9]", "[5, 5]", "id 5 behind 5, and it was the first before"),
    ],
)
def test_a_value_that_none_can_be_is_refused_with_its_name(tmp_path: Path, good: str, bad: str, what: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(LINE + LINE.replace(good, bad))
    with pytest.raises(BadValue, match=f"Line 2 of the trace has {what}"):
        read_trace(path)


@pytest.mark.parametrize("policy", ["hazard", "lru", "lru-plain"])
def test_more_blocks_than_there_are_contents_change_nothing(policy: Policy) -> None:
    requests = read_trace(TRACE)[:200]
    enough = len({key for one in requests for key in one.keys}) + 1000
    ratios = [replay(requests, ReplaySetting(blocks=blocks, policy=policy), 0).hit_ratio for blocks in (enough, 10**21)]
    assert ratios[0] == ratios[1] > 0


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"not packed"])
def test_what_cannot_be_read_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / ("trace.jsonl.gz" if content == b"not packed" else "trace.jsonl")
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(Unreachable, match="cannot be read"):
        read_trace(path)


def test_figures_are_of_all_blocks_and_in_two_stores_they_add_up() -> None:
    requests = read_trace(TRACE)
    alone = replay(requests, ReplaySetting(blocks=1000, policy="lru"), 0)
    two = replay(requests, ReplaySetting(blocks=1000, policy="lru", below=3000), 0)
    assert alone.requests == 700
    assert alone.blocks == sum(len(one.keys) for one in requests)
    assert alone.hit_ratio == alone.hit_ratio_pool == two.hit_ratio_pool
    assert two.hit_ratio > two.hit_ratio_pool
    assert two.writes > 0
    assert alone.touches_per_second == pytest.approx(alone.blocks / (alone.microseconds_per_request * 1e-6 * 700))


def test_with_the_running_request_inside_a_pool_finds_a_little_less() -> None:
    requests = read_trace(TRACE)
    beside = replay(requests, ReplaySetting(blocks=1000), 0)
    inside = replay(requests, ReplaySetting(blocks=1000, inside=True), 0)
    assert beside.lessons > 3
    assert 0.9 * beside.hit_ratio < inside.hit_ratio < 1.02 * beside.hit_ratio


def test_a_pool_that_cannot_hold_the_running_request_is_refused() -> None:
    with pytest.raises(BadValue, match="longest"):
        replay(read_trace(TRACE), ReplaySetting(blocks=10, inside=True), 0)


@pytest.mark.slow
def test_the_pool_and_its_policies_are_quick() -> None:
    """Block touches per second, and what the policy adds to a request: the best of three runs, as others run too."""
    requests = read_trace(CONVERSATION)

    def best(policy: Policy) -> tuple[float, float]:
        runs = [replay(requests, ReplaySetting(blocks=1000, policy=policy), 0) for _ in range(3)]
        return max(one.touches_per_second for one in runs), min(one.microseconds_per_request for one in runs)

    (recency, plain), (learnt, whole) = best("lru"), best("hazard")
    assert recency >= 100_000
    assert learnt >= 50_000
    assert whole - plain <= 60
