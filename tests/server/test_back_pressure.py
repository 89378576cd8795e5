"""An engine that is faster than its reader: the stream's buffer is the bound, and the reader is told."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from dataclasses import dataclass, field

from kveik.engine.stream import Occupancy, RequestStream, TokenEvent
from kveik.request.request import Request, TokenLogprob
from kveik.text.tokenizer import Tokenizer
from tests.server.fakes import make_state, make_tokenizer, serving

BUFFER = 256
ENOUGH = 400_000


@dataclass
class EagerDoor:
    """Puts tokens into real streams, from a thread, until the stream says that its reader is too far behind."""

    tokenizer: Tokenizer
    made: int = 0
    overrun: bool = False
    threads: list[threading.Thread] = field(default_factory=list)

    @property
    def occupancy(self) -> Occupancy:
        return Occupancy(len(self.threads), 0)

    def check_queue_capacity(self, count: int) -> None:
        """There is always room."""

    def submit(self, request: Request) -> RequestStream:
        reader = asyncio.get_running_loop()
        stream = RequestStream(request, self.tokenizer, buffer_tokens=BUFFER, abort=lambda stream, choice: None, reader=reader)
        thread = threading.Thread(target=self._put, args=(stream,), daemon=True)
        thread.start()
        # Listed once it runs: who finds it here and no longer alive may take it for ended.
        self.threads.append(thread)
        return stream

    def _put(self, stream: RequestStream) -> None:
        logprob = TokenLogprob(65, -1.0, tuple((token, -2.0) for token in range(20)))
        while self.made < ENOUGH and not self.overrun:
            self.overrun = not stream.put(TokenEvent(0, (65,), (logprob,)))
            self.made += 1
            stream.reader.call_soon_threadsafe(stream.wake)
            # As fast as a reader who reads can follow, and far faster than one who does not.
            time.sleep(0.0002)
        stream.put(TokenEvent(0, finish_reason="abort"))
        stream.reader.call_soon_threadsafe(stream.wake)


def test_a_reader_who_sleeps_is_aborted_at_the_buffers_bound_and_told_when_he_wakes() -> None:
    tokenizer = make_tokenizer()
    door = EagerDoor(tokenizer)
    state = make_state(door, tokenizer, max_model_len=1 << 20)  # type: ignore[arg-type]  # a door, if not the usual fake
    with serving(state) as (url, _):
        host, port = url.removeprefix("http://").split(":")
        raw = socket.create_connection((host, int(port)), timeout=20)
        body = json.dumps({"prompt": "a", "max_tokens": ENOUGH, "logprobs": 20, "stream": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
        raw.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        deadline = time.monotonic() + 60
        while not door.threads or (door.threads[0].is_alive() and time.monotonic() < deadline):
            time.sleep(0.02)
        assert door.overrun
        assert door.made < ENOUGH / 2
        with raw:
            answer = b"".join(iter(lambda: raw.recv(1 << 20), b""))
    events = [line for line in answer.decode().splitlines() if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"
    # What had been made before the bound was reached is not lost.
    told = sum(len(json.loads(line.removeprefix("data: "))["choices"][0]["logprobs"]["tokens"]) for line in events[:-1])
    assert told == door.made
