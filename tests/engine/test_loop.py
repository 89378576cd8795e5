"""The loop's thread, its mailbox and the streams, with a model that is a function."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from kveik.config import ScheduleConfig, StreamConfig
from kveik.engine.loop import EngineLoop
from kveik.engine.stream import RequestStream
from kveik.errors import BadValue, EngineStopped, NonFiniteLogits, Overloaded, StepFailed
from kveik.observe.events import RequestFinished, StreamOverrun
from kveik.request.sequence import Sequence
from kveik.schedule.plan import StepOutcome
from tests.engine.fakes import EOS, FakeEngine, NextToken, counting, request, spelled
from tests.server.fakes import make_tokenizer

TOKENIZER = make_tokenizer(bos=False)
SECONDS = 10.0


def letters(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def endless(sequence: Sequence) -> int:
    """Letters of the alphabet, over and over."""
    return letters("abcdefghijklmnop")[sequence.output_count % 16]


@dataclass
class Running:
    fake: FakeEngine
    loop: EngineLoop

    async def idle(self) -> bool:
        """Whether the engine has nobody and nothing left, as its own thread sees it."""
        return bool(await self.loop.ask(lambda engine: self.fake.idle()))

    async def becomes_idle(self) -> bool:
        deadline = time.monotonic() + SECONDS
        while not await self.idle():
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.005)
        return True


@contextmanager
def running(
    next_token: NextToken = counting, *, buffer_tokens: int = 1024, max_waiting: int = 64, slow: float = 0.0
) -> Iterator[Running]:
    limits = ScheduleConfig(max_num_seqs=8, max_num_batched_tokens=64, prefill_chunk_size=32, max_waiting=max_waiting)
    fake = FakeEngine(next_token, blocks=512, max_model_len=2048, limits=limits)
    if slow:
        inner = fake.executor.collect

        def collect() -> StepOutcome:
            time.sleep(slow)
            return inner()

        fake.executor.collect = collect  # type: ignore[method-assign]  # a slower model
    loop = EngineLoop(fake.engine, TOKENIZER, StreamConfig(stream_buffer_tokens=buffer_tokens), max_waiting=max_waiting)
    loop.start()
    try:
        yield Running(fake, loop)
    finally:
        loop.stop()


def asyncio_run(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(SECONDS):
            await work()

    asyncio.run(bounded())


async def text_of(stream: RequestStream, choice: int = 0) -> tuple[str, str | None]:
    parts, reason = [], None
    async for delta in stream.deltas():
        if delta.choice == choice:
            parts.append(delta.text)
            reason = delta.finish_reason or reason
    return "".join(parts), reason


def test_a_stream_brings_the_text_of_its_tokens_and_counts_them() -> None:
    with running(spelled(letters("Hello world 42"))) as server:

        async def work() -> None:
            stream = server.loop.submit(request(max_tokens=50))
            assert await text_of(stream) == ("Hello world 42", "stop")
            assert stream.completion_tokens == len(letters("Hello world 42")) + 1, "the end token counts"
            assert await server.becomes_idle()

        asyncio_run(work)


def test_a_hundred_readers_each_get_their_own_tokens_once() -> None:
    def own(sequence: Sequence) -> int:
        return letters("abcdefghij")[(sequence.request.prompt[0] + sequence.output_count) % 10]

    with running(own, max_waiting=200) as server:

        async def one(number: int) -> None:
            stream = server.loop.submit(request([number, *range(30)], max_tokens=10))
            text, _ = await text_of(stream)
            assert text == "".join("abcdefghij"[(number + index) % 10] for index in range(10))

        async def work() -> None:
            await asyncio.gather(*(one(number) for number in range(100)))
            assert await server.becomes_idle()

        asyncio_run(work)


def test_a_stop_string_ends_the_sequence_in_the_engine_too() -> None:
    with running(endless) as server:

        async def work() -> None:
            stream = server.loop.submit(request(max_tokens=1000, stop=("fgh",)))
            assert await text_of(stream) == ("abcde", "stop")
            assert stream.completion_tokens == 8
            assert await server.becomes_idle()

        asyncio_run(work)
        reasons = [event.reason for event in server.fake.of_kind(RequestFinished)]  # type: ignore[attr-defined]  # of that kind
        assert reasons == ["stop"]
        assert sum(plan.tokens for plan in server.fake.executor.plans) < 500, "it did not run on to its 1,000 tokens"


def test_a_reader_that_leaves_frees_the_blocks() -> None:
    with running(endless, slow=0.001) as server:

        async def work() -> None:
            stream = server.loop.submit(request(max_tokens=1500, n=3))
            async for _ in stream.deltas():
                break
            stream.abort()
            assert await server.becomes_idle()
            stream.abort()
            assert await server.idle(), "a second abort is harmless"

        asyncio_run(work)


def test_a_request_may_be_aborted_before_it_was_ever_admitted() -> None:
    with running(endless, slow=0.001) as server:

        async def work() -> None:
            streams = [server.loop.submit(request([number] * 20, max_tokens=1500)) for number in range(12)]
            for stream in reversed(streams):
                stream.abort()
            assert await server.becomes_idle()

        asyncio_run(work)


def test_an_abort_from_elsewhere_ends_the_text_with_its_reason() -> None:
    with running(endless, slow=0.001) as server:

        async def work() -> None:
            stream = server.loop.submit(request(max_tokens=1500))
            asyncio.get_running_loop().call_later(0.05, stream.abort)
            text, reason = await text_of(stream)
            assert reason == "abort"
            assert ("abcdefghijklmnop" * 100).startswith(text)

        asyncio_run(work)


def test_a_reader_that_sleeps_loses_its_request_and_others_do_not_notice() -> None:
    with running(endless, buffer_tokens=128) as server:

        async def work() -> None:
            sleeper = server.loop.submit(request(range(50), max_tokens=1500))
            # Shorter than the buffer, so this one is safe however late its reader comes.
            brief = server.loop.submit(request(range(60, 90), max_tokens=100))
            # The whole event loop sleeps, so nobody reads.
            while not server.fake.of_kind(StreamOverrun):
                time.sleep(0.005)
            assert (await text_of(brief))[1] == "length"
            text, reason = await text_of(sleeper)
            assert reason == "abort"
            assert 128 <= len(text) < 1500
            assert await server.becomes_idle()

        asyncio_run(work)
        assert len(server.fake.of_kind(StreamOverrun)) == 1


def test_a_failed_sequence_raises_for_its_own_reader_alone() -> None:
    with running(endless) as server:
        server.fake.executor.fail_sequence = lambda sequence: sequence.request.prompt[0] == 7 and sequence.output_count == 2

        async def work() -> None:
            good = server.loop.submit(request([1] * 20, max_tokens=32))
            bad = server.loop.submit(request([7] * 20, max_tokens=32))
            with pytest.raises(NonFiniteLogits, match="has ended; other requests continue"):
                await text_of(bad)
            assert (await text_of(good))[1] == "length"
            assert await server.becomes_idle()

        asyncio_run(work)


def test_a_failed_step_raises_for_its_readers_as_what_it_is() -> None:
    with running(endless) as server:
        server.fake.executor.fail_step = lambda plan: len(server.fake.executor.plans) == 3

        async def work() -> None:
            with pytest.raises(StepFailed, match="failed inside the engine"):
                await text_of(server.loop.submit(request([1] * 20, max_tokens=32)))
            assert (await text_of(server.loop.submit(request([2] * 20, max_tokens=32))))[1] == "length"

        asyncio_run(work)


def test_a_full_queue_refuses_at_once_and_names_the_knob() -> None:
    with running(endless, max_waiting=4, slow=0.01) as server:

        async def work() -> None:
            streams = []
            with pytest.raises(Overloaded, match=r"at most 4 \(--max-waiting\)") as refused:
                for number in range(40):
                    streams.append(server.loop.submit(request([number] * 20, max_tokens=1500)))
            assert (refused.value.status, refused.value.retry_after) == (429, 1)
            for stream in streams:
                stream.abort()
            assert await server.becomes_idle()
            assert (await text_of(server.loop.submit(request(max_tokens=3))))[1] == "length", "and then takes requests again"

        asyncio_run(work)


def test_a_request_that_the_queue_never_holds_is_refused_for_good_with_the_limit() -> None:
    with running(endless, slow=0.001) as server:

        async def work() -> None:
            limit = server.loop._max_waiting
            with pytest.raises(BadValue, match=rf"{limit + 1} sequences.*at most {limit} \(--max-waiting\)") as refused:
                server.loop.check_queue_capacity(limit + 1)
            assert (refused.value.status, refused.value.param) == (400, "n")
            server.loop.check_queue_capacity(limit)
            assert server.loop.active == 0

        asyncio_run(work)


def test_running_and_waiting_are_all_open_sequences_also_in_the_middle_of_a_step() -> None:
    with running(endless, slow=0.2) as server:

        async def work() -> None:
            streams = [server.loop.submit(request([number] * 20, max_tokens=1500)) for number in range(4)]
            for _ in range(20):
                occupancy = server.loop.occupancy
                assert occupancy.running + occupancy.waiting == 4
                await asyncio.sleep(0.02)
            assert occupancy.running > 0
            for stream in streams:
                stream.abort()

        asyncio_run(work)


def test_a_draining_loop_takes_nobody_and_finishes_whom_it_has() -> None:
    with running(endless, slow=0.001) as server:

        async def work() -> None:
            stream = server.loop.submit(request(max_tokens=64))
            server.loop.drain()
            with pytest.raises(Overloaded) as refused:
                server.loop.submit(request())
            assert refused.value.status == 503
            assert (await text_of(stream))[1] == "length"
            assert server.loop.active == 0

        asyncio_run(work)


def test_a_stop_ends_every_stream_with_abort() -> None:
    with running(endless, slow=0.001) as server:

        async def work() -> None:
            streams = [server.loop.submit(request([number] * 20, max_tokens=1900)) for number in range(12)]
            readers = [asyncio.create_task(text_of(stream)) for stream in streams]
            await asyncio.sleep(0.05)
            await asyncio.to_thread(server.loop.stop)
            assert {reason for _, reason in await asyncio.gather(*readers)} == {"abort"}
            assert not server.loop.alive

        asyncio_run(work)
    assert server.fake.idle()


def test_a_broken_loop_ends_every_stream_with_an_error_and_takes_no_more() -> None:
    with running(endless, slow=0.001) as server:

        async def work() -> None:
            stream = server.loop.submit(request(max_tokens=1900))
            async for _ in stream.deltas():
                break

            def settle(*_: object) -> None:
                raise AssertionError("a law is broken")

            server.fake.scheduler.settle = settle  # type: ignore[method-assign, assignment]  # a fault in the books
            with pytest.raises(EngineStopped, match="Restart the server"):
                await text_of(stream)
            with pytest.raises(Overloaded):
                server.loop.submit(request())

        asyncio_run(work)
        assert not server.loop.alive or server.loop._thread.join(SECONDS) is None


def test_a_reader_whose_event_loop_is_gone_holds_no_blocks() -> None:
    with running(endless, slow=0.002) as server:

        async def submit() -> None:
            server.loop.submit(request(max_tokens=1900))

        asyncio.run(submit())

        async def work() -> None:
            assert await server.becomes_idle()

        asyncio_run(work)


def test_ignored_end_tokens_and_own_stop_tokens() -> None:
    stop = letters("x")[0]
    with running(spelled([*letters("ab"), EOS, *letters("c"), stop])) as server:

        async def work() -> None:
            asked = {"max_tokens": 50, "ignore_eos": True, "stop_token_ids": (stop,)}
            stream = server.loop.submit(request(**asked))
            text, reason = await text_of(stream)
            assert (text.replace(TOKENIZER.decode([EOS]), ""), reason) == ("abc", "stop")
            shown = server.loop.submit(request(range(60), include_stop_str_in_output=True, **asked))
            assert (await text_of(shown))[0].endswith("cx")

        asyncio_run(work)
