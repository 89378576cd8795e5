"""Five thousand callers at once: some are served, the others are told to come back, and probes are answered all the while."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

import httpx
import pytest

from tests.server.fakes import running

CALLERS, ROOM = 5000, 1024

# A process of its own, so that neither the server nor the probe shares an interpreter with it.
CROWD = """
import asyncio, json, sys
from collections import Counter

host, port, callers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
body = json.dumps({"prompt": "Hello", "max_tokens": 4}).encode()
head = "POST /v1/completions HTTP/1.1\\r\\nhost: x\\r\\nconnection: close\\r\\ncontent-type: application/json\\r\\n"
message = f"{head}content-length: {len(body)}\\r\\n\\r\\n".encode() + body

async def ask():
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(message)
    answer = await reader.read(-1)
    writer.close()
    await writer.wait_closed()
    return f"{answer.split(b' ', 2)[1].decode()} {'later' if b'retry-after: ' in answer else 'now'}"

async def main():
    return Counter(await asyncio.gather(*(ask() for _ in range(callers))))

print(json.dumps(asyncio.run(main())))
"""


@pytest.mark.slow
def test_a_crowd_is_served_or_told_to_come_back_and_probes_are_answered_within_a_second() -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < CALLERS + 200:
        pytest.skip("The limit of open files is too low for so many connections.")
    with running() as server:
        server.door.room, server.door.hold = ROOM, True
        host, port = server.url.removeprefix("http://").split(":")
        crowd = subprocess.Popen([sys.executable, "-c", CROWD, host, port, str(CALLERS)], stdout=subprocess.PIPE, text=True)
        waits = []
        while crowd.poll() is None:
            for path in ("/health", "/metrics"):
                begun = time.monotonic()
                assert httpx.get(server.url + path, timeout=20).status_code == 200
                waits.append(time.monotonic() - begun)
            # Once everybody else has been refused, those in the queue are served.
            server.door.hold = server.state.gauges.statuses[429] < CALLERS - ROOM
            time.sleep(0.02)
        answers = json.loads(crowd.communicate()[0])
        assert answers == {"200 now": ROOM, "429 later": CALLERS - ROOM}
        assert len(waits) > 10
        assert max(waits) < 1
        assert server.until(lambda: server.state.traffic.calls == 0)
        assert server.state.traffic.streams == 0
