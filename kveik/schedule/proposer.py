"""Proposers of tokens that may come next: guesses that a step computes along with a sequence's certain token."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Protocol

from kveik.request.sequence import Sequence


class Proposer(Protocol):
    """Guesses tokens. A wrong guess costs time and changes no output: only tokens that the sampler chooses too are kept."""

    def propose(self, sequence: Sequence, limit: int) -> Items[int]:
        """Tokens that may follow the sequence's newest one; those beyond `limit` are ignored."""
        ...


class NoProposer:
    """Makes no guesses."""

    def propose(self, sequence: Sequence, limit: int) -> Items[int]:
        return ()
