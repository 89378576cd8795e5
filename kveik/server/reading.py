"""Reads the engine's streams while the client is connected."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NoReturn, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from kveik.engine.stream import Stream
from kveik.server.answer import ChoiceParts, parts_of
from kveik.server.translate import Call

Result = TypeVar("Result")
Take = Callable[[ChoiceParts], Awaitable[None]]


async def while_connected(
    receive: Receive, work: Coroutine[Any, Any, Result], *guards: Coroutine[Any, Any, NoReturn]
) -> Result:
    """Run the work while the client is connected. The request's body must have been read before.

    Raises:
        starlette.requests.ClientDisconnect: the client left first; the work was cancelled.
        Exception: what a guard raised, which ends the work as well.
    """
    working = asyncio.ensure_future(work)
    watching = [asyncio.ensure_future(guard) for guard in (_departure(receive), *guards)]
    try:
        await asyncio.wait({working, *watching}, return_when=asyncio.FIRST_COMPLETED)
        for guard in watching:
            if guard.done() and not working.done():
                guard.result()
        return working.result()
    finally:
        for task in (working, *watching):
            task.cancel()
        await asyncio.gather(working, *watching, return_exceptions=True)


async def _departure(receive: Receive) -> NoReturn:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnect


async def read_parts(call: Call, streams: Sequence[Stream], take: Take) -> None:
    """Pass every choice's parts to `take` as they come, all prompts at once; return when all choices have ended.

    While `take` waits for a slow client, its stream is not read: the stream's buffer bounds the tokens that wait.

    Raises:
        Broken: a choice failed inside the engine.
        Exception: whatever `take` raised.
    """
    if len(streams) == 1:
        await _read_one(call, 0, streams[0], take)
        return
    try:
        async with asyncio.TaskGroup() as group:
            for prompt, stream in enumerate(streams):
                group.create_task(_read_one(call, prompt, stream, take))
    except BaseExceptionGroup as failures:
        # The first one caused the cancellation of the others.
        raise failures.exceptions[0] from None


async def _read_one(call: Call, prompt: int, stream: Stream, take: Take) -> None:
    begun: set[int] = set()
    async for delta in stream.deltas():
        first = delta.choice not in begun
        begun.add(delta.choice)
        await take(parts_of(delta, call, prompt, stream, first=first))


async def read_whole(call: Call, streams: Sequence[Stream]) -> list[ChoiceParts]:
    """Returns every choice, complete, in the order of their indices.

    Raises:
        Broken: one of them failed inside the engine.
    """
    news: list[list[ChoiceParts]] = [[] for _ in range(len(streams) * call.n)]

    async def take(parts: ChoiceParts) -> None:
        news[parts.index].append(parts)

    await read_parts(call, streams, take)
    return [ChoiceParts.joined(index, parts) for index, parts in enumerate(news)]
