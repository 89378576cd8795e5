"""Which cached block goes when one is needed: one policy decides on chains, and the blocks of every layer group follow.

The *leading* group is the first without a window (or the first of all): a chain that it has lost cannot be found, whatever the
others still have. The policy knows the leading group's full blocks, and says which of them goes; the others' blocks of the same
content go with it, and are the next to be taken there. A group that runs short by itself, because a window leaves it fewer
blocks, gives up what the policy values least among its `SAMPLES` oldest.

A block that no policy was told of yet (its request is running, or was preempted and will come back) goes after all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from functools import partial
from itertools import islice

from kveik.cache.eviction.policy import EvictionPolicy, Retention, Visit
from kveik.cache.group import GroupBlocks
from kveik.cache.layout import LayerGroup

SAMPLES = 16


def leading(groups: Sequence[LayerGroup]) -> int:
    """Number of the group whose blocks the policy counts."""
    return next((number for number, group in enumerate(groups) if group.window is None), 0)


class Evictor:
    """Joins the groups with their policy; without one, each group goes by its pool's order, which is LRU."""

    def __init__(self, groups: Sequence[GroupBlocks], policy: EvictionPolicy | None) -> None:
        self.policy = policy
        self.now = 0.0
        """Seconds on the engine's clock, told by whoever sees one."""

        self.offer: Callable[[bytes], None] | None = None
        """Called with the key of a full block before its content goes: a store below may take it."""

        self._groups = groups
        self._lead = groups[leading([group.group for group in groups])]
        if policy is None:
            return
        for group in groups:
            group.give_up = partial(self._give_up_of, group)
        self._lead.give_up = self._give_up
        self._lead.forgotten = policy.discarded

    def finished(self, keys: Sequence[bytes], *, tokens_out: int, came: float, retention: Retention | None = None) -> None:
        """A request is over whose full blocks had these keys; nobody holds them for it any more."""
        policy, by_key = self.policy, self._lead.index.by_key
        if policy is None:
            return
        stored = next((place for place, key in enumerate(keys) if key not in by_key), len(keys))
        # What follows a gap can never be found.
        for group in self._groups:
            for key in keys[stored:]:
                group.lose(key)
                policy.discarded(key)
        policy.used(Visit(keys, stored, tokens_out, came, self.now, retention))

    def learn(self) -> None:
        """Let the policy draw conclusions if it has seen enough: milliseconds, at most once per 64 requests."""
        if self.policy is not None and self.policy.wants_lesson:
            self.policy.learn(self.now)

    def _give_up(self) -> None:
        """In the leading group, and whatever belongs to it elsewhere."""
        assert self.policy is not None
        key = self.policy.victim(self._may_go, self.now)
        if key is not None:
            if self.offer is not None:
                self.offer(key)
            for group in self._groups:
                group.lose(key)

    def _may_go(self, key: bytes) -> bool:
        return self._lead.pool.references[self._lead.index.by_key[key]] == 0

    def _give_up_of(self, group: GroupBlocks) -> None:
        """In a group with a window. What was valued more than the one that goes is not looked at again soon."""
        assert self.policy is not None
        policy, pool, now = self.policy, group.pool, self.now
        oldest = [(block, entry.key) for block in islice(pool.oldest(), SAMPLES) if (entry := group.index.entry(block))]
        worth = [policy.worth(key, now) for _, key in oldest if key is not None]
        place = worth.index(min(worth))
        for block, _ in oldest[:place]:
            pool.renew(block)
        group.forget([oldest[place][0]])

    def check(self, open_keys: Set[bytes]) -> None:
        """The policy knows the leading group's full blocks that nobody holds, but for some in the open sequences' chains.

        Raises AssertionError.
        """
        policy = self.policy
        if policy is not None:
            known = {key for key in self._lead.index.by_key if policy.holds(key)}
            policy.check(known)
            references = self._lead.pool.references
            unheld = {key for key, block in self._lead.index.by_key.items() if references[block] == 0}
            assert unheld - known <= open_keys, "a cached block is not known to the policy"
