"""Starting and stopping: ports, signals, and running requests that may end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from kveik.config import ServerConfig
from kveik.errors import Unreachable
from kveik.server.app import create_app
from kveik.server.http_server import serve
from kveik.server.sockets import listen
from tests.server.fakes import FakeDoor, Running, make_state, make_tokenizer, running

ASK = {"prompt": "Hello", "max_tokens": 40, "stream": True}


def test_a_taken_port_is_refused_with_its_number_and_the_knob() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        tokenizer = make_tokenizer()
        app = create_app(make_state(FakeDoor(tokenizer), tokenizer))
        with pytest.raises(Unreachable, match=rf"Port {port} .*--port"):
            serve(app, ServerConfig(port=port), lambda url: pytest.fail("it was not ready"))


def test_a_host_that_is_not_ours_is_refused_with_the_knob() -> None:
    with pytest.raises(Unreachable, match="--host"):
        listen("no.such.host.invalid", 0)
    with pytest.raises(Unreachable, match=r"no address 203\.0\.113\.1 .*--host"):
        listen("203.0.113.1", 0)


def asking(server: Running, answers: list[httpx.Response]) -> threading.Thread:
    thread = threading.Thread(target=lambda: answers.append(httpx.post(f"{server.url}/v1/completions", json=ASK, timeout=20)))
    thread.start()
    assert server.until(lambda: bool(server.door.streams) and server.door.streams[-1].read_tokens > 0)
    return thread


def test_a_stop_lets_running_requests_end_and_refuses_new_ones_with_503() -> None:
    answers: list[httpx.Response] = []
    with running(step_seconds=0.02, drain_seconds=10) as server:
        thread = asking(server, answers)
        server.server.stop()
        assert server.until(lambda: server.state.traffic.draining)
        for path in ("/v1/completions", "/v1/chat/completions"):
            refused = httpx.post(server.url + path, json=ASK)
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == "service_unavailable_error"
        thread.join(10)
    assert '"finish_reason":"length"' in answers[0].text
    assert answers[0].text.endswith("data: [DONE]\n\n")


def test_what_lasts_longer_than_the_drain_is_aborted() -> None:
    answers: list[httpx.Response] = []
    with running(step_seconds=0.1, drain_seconds=0.1) as server:
        thread = asking(server, answers)
        server.server.stop()
        thread.join(10)
        assert server.door.streams[0].read_tokens < ASK["max_tokens"], "it did not come to its own end"
    assert len(server.door.aborted) == 1
    assert '"finish_reason":"abort"' in answers[0].text


def test_a_second_stop_does_not_wait() -> None:
    answers: list[httpx.Response] = []
    with running(step_seconds=0.1, drain_seconds=60) as server:
        thread = asking(server, answers)
        server.server.stop()
        server.server.stop()
        thread.join(10)
        assert server.door.streams[0].read_tokens < ASK["max_tokens"], "it did not come to its own end"
    assert len(server.door.aborted) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_process_with_exit_code_0(number: signal.Signals) -> None:
    program = (
        "from tests.server.fakes import *\n"
        "from kveik.server.http_server import serve\n"
        "tokenizer = make_tokenizer()\n"
        "state = make_state(FakeDoor(tokenizer), tokenizer)\n"
        "serve(create_app(state), state.config, lambda url: print(url, flush=True))\n"
        "print('ended')\n"
    )
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    )
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    assert httpx.get(f"{url}/health").status_code == 200
    process.send_signal(number)
    rest, errors = process.communicate(timeout=15)
    assert (process.returncode, rest, errors) == (0, "ended\n", "")
