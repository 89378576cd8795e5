"""Says in the log when a tier below the pool cannot be used, and when it can again; and what it keeps at the end.

How seldom is the engine's to say.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType

from kveik.machine.address_space import amount
from kveik.observe.events import Event, RecordsDamaged, TierChanged, TierKept
from kveik.words import counted

log = logging.getLogger(__name__)

_WORDS = {"reading": "nothing is read from it: {}", "writing": "nothing is written to it: {}", "store": "{}"}


def log_tiers(event: Event, titles: Mapping[str, str] = MappingProxyType({})) -> None:
    """A listener. `titles`: what to call tiers, where that is not their name alone."""
    match event:
        case TierChanged():
            more = f" (faults since the line before: {event.faults})" if event.faults > 1 else ""
            level, how = (logging.WARNING, "is in trouble") if event.worse else (logging.INFO, "is better, but")
            log.log(level, "The tier %s %s%s.", titles.get(event.tier, event.tier), _state(event.hindrances, how), more)
        case RecordsDamaged():
            title = titles.get(event.tier, event.tier)
            records = counted(event.records, "damaged record")
            log.warning("The tier %s gave %s; what they held is computed again.", title, records)
        case TierKept():
            log.log(logging.WARNING if event.missing else logging.INFO, "%s", _kept(event))


def _state(hindrances: Mapping[str, str], how: str) -> str:
    if not hindrances:
        return "is available again"
    return f"{how}: {hindered(hindrances)}"


def hindered(hindrances: Mapping[str, str]) -> str:
    """What is wrong with a tier, for people; empty: nothing."""
    return "; ".join(_WORDS[part].format(why) for part, why in hindrances.items())


def _kept(event: TierKept) -> str:
    line = f"The tier {event.tier} keeps {counted(event.records, 'record', ',')} ({amount(event.bytes)}) for the next start"
    if event.written:
        line += f", {event.written:,} of them written now"
    if event.missing:
        why = "" if event.late_seconds is None else f" within {event.late_seconds:g} s (--drain-seconds)"
        line += f"; {event.missing:,} more could not be written{why}"
    return f"{line}."
