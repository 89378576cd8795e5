"""Sequence: one choice of a request, with its tokens and its progress.

States: WAITING (in the queue, holds no blocks) → RUNNING (admitted, holds blocks) → FINISHED. Preemption leads from RUNNING
back to WAITING: the tokens stay, the blocks go, `computed` returns to zero. There are no phases: a sequence has a length and
a computed count, and every step lets computed catch up with length.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from kveik.request.request import Request, SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class Progress(Protocol):
    """Computed tokens of running sequences, by row."""

    computed: NDArray[np.int64]


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of one request.

    tokens   [ p p p p p p p p | o o o o ]        p: prompt, o: output
             |--- computed ---|                   keys and values of these are in the cache
                              |--- pending ---|   what the next steps must compute
    """

    id: int
    """Unique in the process, never reused; increases with arrival."""

    request: Request
    choice: int
    """Index among the request's n choices."""

    seed: int
    """The seed of this choice: from the request, or drawn by the engine at arrival. Survives preemption."""

    arrived: float
    """Seconds on the engine's clock."""

    tokens: list[int]
    prompt_length: int
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    """The stop token that ended it; None where none did."""

    cached_tokens: int | None = None
    """Prompt tokens hit in the cache at the first admission; None before it. Later admissions do not count."""

    loaded_tokens: Mapping[str, int] = field(default_factory=dict)
    """Those of them that were loaded from tiers, by the tier's name."""

    admitted: float | None = None
    """Time of the first admission, seconds."""

    first_token: float | None = None
    """Time of the first token, seconds."""

    last_token: float | None = None
    """Time of the newest token, seconds; set when it stops running."""

    reached: int = 0
    """Largest number of prompt tokens that were in the cache, up to the time it last stopped running."""

    preemptions: int = 0
    batch: Progress | None = None
    """Keeps its progress while RUNNING."""

    row: int | None = None
    """Its row in `batch`, and in the block tables."""

    admission: int = 0
    """Serial number of the latest admission; a larger number is a later admission."""

    passed_over: int = 0
    """Number of times that a sequence behind it in the queue was admitted ahead of it."""

    end_length: int = 0
    """Length in tokens at which it ends with 'length'; set when it is queued."""

    stop_length: int = 0
    """Length in tokens from which stop tokens end it (`min_tokens`); set when it is queued."""

    stop_ids: frozenset[int] = frozenset()
    """Tokens that end it with 'stop'; set when it is queued."""

    @classmethod
    def start(cls, *, id: int, request: Request, choice: int, seed: int, arrived: float) -> Sequence:
        tokens = list(request.prompt)
        return cls(id=id, request=request, choice=choice, seed=seed, arrived=arrived, tokens=tokens, prompt_length=len(tokens))

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def computed(self) -> int:
        """Tokens whose keys and values are in the cache; 0 while it does not run."""
        return 0 if self.batch is None else int(self.batch.computed[self.row])

    @property
    def pending(self) -> int:
        """Tokens that must be computed before the next one can be sampled; 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def output_count(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def decoding(self) -> bool:
        """True if only the newest sampled token is pending."""
        return self.pending == 1 and self.output_count > 0

    @property
    def hit_limit(self) -> int:
        """Tokens that may come from the cache: all but the last, whose logits are needed; none where all logits are.

        The choices of a request have one prompt; only the first one reports its log-probabilities.
        """
        if self.sampling.prompt_logprobs is not None and self.choice == 0 and self.output_count == 0:
            return 0
        return len(self.tokens) - 1

    def count_until_end(self, tokens: list[int]) -> int:
        """Returns how many of these new tokens belong to it: all, or those up to the one that is its last."""
        for count, token in enumerate(tokens, start=1):
            if self.end_reason(token, len(self.tokens) + count) is not None:
                return count
        return len(tokens)

    def end_reason(self, token: int, length: int) -> FinishReason | None:
        """Returns the reason why `token`, with which it has `length` tokens, is its last; None where it is not."""
        if token in self.stop_ids and length >= self.stop_length:
            return "stop"
        return "length" if length >= self.end_length else None
