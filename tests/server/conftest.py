"""A server over a fake door, shared by the tests of one file that only ask."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.server.fakes import Running, running


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(max_body_bytes=4 * 1024 * 1024) as started:
        yield started


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=20) as opened:
        yield opened
