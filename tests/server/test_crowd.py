"""Five thousand callers at once: some are served, the others are told to come back, and probes are answered all the while."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.server import probing
from tests.server.fakes import Running, running

ROOT = Path(__file__).parents[2]
CALLERS, ROOM = 5000, 1024

# A process of its own, as the probes are, so that neither shares an interpreter with the server.
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


def crowd_and_probes(server: Running) -> tuple[dict[str, int], list[tuple[float, float]]]:
    """Answers by kind, and for each probe its seconds and the server's part of them."""
    host, port = server.url.removeprefix("http://").split(":")
    command = [sys.executable, "-m", probing.__name__, host, port, str(os.getpid())]
    crowd = subprocess.Popen([sys.executable, "-c", CROWD, host, port, str(CALLERS)], stdout=subprocess.PIPE, text=True)
    probes = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    while crowd.poll() is None:
        # Once everybody else has been refused, those in the queue are served.
        server.door.hold = server.state.gauges.statuses[429] < CALLERS - ROOM
        time.sleep(0.02)
    told = probes.communicate()[0]
    return json.loads(crowd.communicate()[0]), json.loads(told)


@pytest.mark.slow
def test_a_crowd_is_served_or_told_to_come_back_and_the_server_keeps_no_probe_waiting_for_a_second() -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < CALLERS + 200:
        pytest.skip("The limit of open files is too low for so many connections.")
    if not probing.tells():
        pytest.skip("The system does not say how long threads wait for a processor.")
    with running() as server:
        server.door.room, server.door.hold = ROOM, True
        answers, probes = crowd_and_probes(server)
        assert answers == {"200 now": ROOM, "429 later": CALLERS - ROOM}
        assert len(probes) > 10
        # On a busy machine probes take longer than this; what they wait for then is a processor, and not the server.
        assert max(own for _, own in probes) < 1
        assert server.until(lambda: server.state.traffic.calls == 0)
        assert server.state.traffic.streams == 0
