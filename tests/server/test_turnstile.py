"""Calls pass in order and a few per turn of the event loop."""

from __future__ import annotations

import asyncio

from kveik.server.app import Turnstile


def test_a_crowd_passes_in_order_and_a_few_per_turn() -> None:
    passed: list[int] = []
    seen: list[int] = []

    async def call(number: int, turnstile: Turnstile) -> None:
        await turnstile.enter()
        passed.append(number)

    async def main() -> None:
        turnstile = Turnstile(per_turn=4)
        calls = [asyncio.create_task(call(number, turnstile)) for number in range(50)]
        while not all(task.done() for task in calls):
            await asyncio.sleep(0)
            seen.append(len(passed))

    asyncio.run(main())
    assert passed == list(range(50))
    assert max(after - before for before, after in zip([0, *seen], seen, strict=False)) <= 4
    assert len(seen) >= 12


def test_a_call_without_a_crowd_passes_at_once() -> None:
    async def main() -> None:
        turnstile = Turnstile(per_turn=2)
        for _ in range(10):
            entering = turnstile.enter()
            try:
                entering.send(None)
            except StopIteration:
                passed = True
            assert passed
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    asyncio.run(main())


def test_a_call_that_leaves_the_line_takes_nobodys_turn() -> None:
    async def main() -> list[int]:
        turnstile, passed = Turnstile(per_turn=1), []

        async def call(number: int) -> None:
            await turnstile.enter()
            passed.append(number)

        calls = [asyncio.create_task(call(number)) for number in range(6)]
        await asyncio.sleep(0)
        calls[2].cancel()
        calls[3].cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        return passed

    assert asyncio.run(main()) == [0, 1, 4, 5]
