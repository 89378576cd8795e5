"""Offload as scheduler and engine see it: a protocol, and its null twin for an engine without tiers."""

from __future__ import annotations

from collections.abc import Hashable, Set
from typing import Protocol

from kveik.cache.eviction.policy import EvictionPolicy, Learnt
from kveik.cache.prefix_match import PrefixMatch
from kveik.offload.mailbox import Mailbox
from kveik.offload.sequence_load import LoadWait
from kveik.offload.transfer import TierStats
from kveik.request.sequence import Sequence


class Offload(Protocol):
    """Tiers below the pool. All is called on the step thread, but for `stats`.

    attend ── plan: expire, begin, admitted …, plan_made ── carry_out ── copies of blocks ── start_loads ── step
    """

    mailbox: Mailbox
    """Nudged when a tier has something to tell."""

    @property
    def policies(self) -> list[EvictionPolicy]:
        """Policies of the tiers, from the nearest to the pool down."""
        ...

    @property
    def loading(self) -> int:
        """Loads, and questions to tiers, that sequences wait for."""
        ...

    @property
    def deadline(self) -> float | None:
        """End of the next wait, on the engine's clock."""
        ...

    @property
    def unsettled(self) -> bool:
        """True where `attend` is due soon although nothing runs."""
        ...

    def has(self, claim: Hashable) -> bool:
        """True where a claim is a load that is still waited for."""
        ...

    def expire(self, now: float) -> bool:
        """Stop waiting for what took longer than computing. Returns True where records have arrived since the last call."""
        ...

    def begin(self, sequence: Sequence, match: PrefixMatch | None, limit: int, now: float) -> LoadWait | None:
        """Load what lies below behind this match, if that is sooner than computing and the sequence could be admitted now.

        The load to wait for, perhaps another's of the same content. None: there is nothing to wait for.
        """
        ...

    def release_for_blocks(self) -> bool:
        """Free the blocks of the latest load, ended or not. False: no load has any."""
        ...

    def plan_made(self) -> bool:
        """Free the blocks of loads that are over. False: there were none."""
        ...

    def admitted(self, sequence_id: int, match: PrefixMatch | None) -> dict[str, int]:
        """The sequence runs. Tokens of its match that were loaded for it, by the tier's name."""
        ...

    def dropped(self, sequence_id: int) -> None:
        """The sequence has ended."""
        ...

    def attend(self, now: float) -> None:
        """Take note of what has ended. Before every plan."""
        ...

    def carry_out(self, now: float) -> None:
        """Copy what the pool gave up, before anything is written into it; and all else but loads."""
        ...

    def start_loads(self) -> None:
        """Begin the loads of the latest plan; they may write into blocks that its copies have read."""
        ...

    def start(self) -> None:
        """Start the tiers' threads."""
        ...

    def reset(self) -> None:
        """Remove everything from the tiers, as far as it is ours."""
        ...

    def retire(self, now: float, seconds: float) -> None:
        """Store what is worth keeping where it lasts, as far as the time suffices; then close the stores."""
        ...

    def learn(self, now: float) -> None:
        """Let the tiers' policies draw conclusions if they have seen enough; for between two steps."""
        ...

    def learnt(self) -> Learnt:
        """Learnt speeds of the tiers."""
        ...

    def restore(self, learnt: Learnt) -> None:
        """Take over what is there of it. Raises ValueError where a table is malformed."""
        ...

    def stats(self) -> list[TierStats]:
        """Returns the state of every tier, from the nearest to the pool down. From any thread."""
        ...

    def check(self, waiting: Set[int]) -> None:
        """Check its laws, given the ids of all waiting sequences. Raises AssertionError."""
        ...


class NoOffload:
    """No tiers: what the pool gives up is gone."""

    policies: list[EvictionPolicy] = []  # noqa: RUF012  # never written
    loading = 0
    deadline: float | None = None
    unsettled = False

    def __init__(self) -> None:
        self.mailbox = Mailbox()

    def has(self, claim: Hashable) -> bool:
        return False

    def expire(self, now: float) -> bool:
        return False

    def begin(self, sequence: Sequence, match: PrefixMatch | None, limit: int, now: float) -> None:
        return None

    def release_for_blocks(self) -> bool:
        return False

    def plan_made(self) -> bool:
        return False

    def admitted(self, sequence_id: int, match: PrefixMatch | None) -> dict[str, int]:
        return {}

    def dropped(self, sequence_id: int) -> None: ...

    def attend(self, now: float) -> None: ...

    def carry_out(self, now: float) -> None: ...

    def start_loads(self) -> None: ...

    def start(self) -> None: ...

    def reset(self) -> None: ...

    def retire(self, now: float, seconds: float) -> None: ...

    def learn(self, now: float) -> None: ...

    def learnt(self) -> Learnt:
        return {}

    def restore(self, learnt: Learnt) -> None: ...

    def stats(self) -> list[TierStats]:
        return []

    def check(self, waiting: Set[int]) -> None: ...
