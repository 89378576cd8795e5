"""Scheduler: plans the tokens of the next step and their blocks, and settles its outcome.

There are no phases. A sequence has a length and a computed count, and every step lets computed catch up with length:

    plan    1. every running sequence with one pending token gets it, and a block where it needs one
            2. running sequences that are further behind, in the policy's order, as far as the token budget goes
            3. admissions: waiting sequences, in the queue's order, as far as budget, rows and blocks go
            4. guesses of the proposer behind the tokens of 1, as far as tokens and blocks are left
    settle  computed advances, tokens are appended, finished sequences are released, full blocks are cached

When no block is left, the newest admitted (under `priority`: the least urgent) is preempted: its blocks are freed, its tokens
stay, and it returns to its place in the queue. So the oldest admitted always makes progress and finishes; then the next is
oldest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterator

import numpy as np

from kveik.cache.eviction.policy import Retention
from kveik.cache.kv_cache_manager import KVCacheManager
from kveik.cache.prefix_match import PrefixMatch
from kveik.config import ScheduleConfig
from kveik.errors import Overloaded, PromptTooLong
from kveik.offload.interface import NoOffload, Offload
from kveik.request.sequence import FinishReason, Sequence, Status
from kveik.schedule.draft import Draft
from kveik.schedule.explanations import Explanations
from kveik.schedule.plan import Finished, Settled, StepOutcome, StepPlan
from kveik.schedule.proposer import NoProposer, Proposer
from kveik.schedule.reasons import Cause, PrefixInFlight
from kveik.schedule.running_batch import RunningBatch
from kveik.schedule.scheduling_policy import Policy, policy_for
from kveik.schedule.settle import commit_rows
from kveik.schedule.waiting_queue import WaitingQueue
from kveik.words import counted


class Scheduler:
    """Decides steps. Single-threaded; `plan` and `settle` alternate, `add` and `abort` come between any two calls."""

    def __init__(
        self,
        kv_cache: KVCacheManager,
        limits: ScheduleConfig,
        max_model_len: int,
        eos_ids: frozenset[int] = frozenset(),
        offload: Offload | None = None,
        *,
        policy: Policy | None = None,
        proposer: Proposer | None = None,
    ) -> None:
        """The KV cache manager has these limits too. `offload`: of the same KV cache; None: no tiers.
        `policy`: overrides the one in `limits`. `proposer`: guesses tokens to compute along with the certain ones.
        """
        assert kv_cache.rows <= limits.max_num_seqs, "the KV cache manager has more rows than sequences may run"
        assert max_model_len <= kv_cache.max_model_len, "the KV cache manager's tables are shorter than the context"
        largest = min(limits.chunk_tokens_max, max_model_len)
        assert largest <= kv_cache.max_chunk, "the KV cache manager's windowed groups count with smaller chunks"
        self.kv_cache = kv_cache
        self.offload: Offload = offload or NoOffload()
        # Prompt tokens of all sequences admitted so far, each counted once, and those of them that were hit in the cache.
        self.prefix_queries = self.prefix_hits = 0
        self._limits = limits
        self._max_model_len = max_model_len
        self._eos_ids = eos_ids
        self._policy = policy or policy_for(limits)
        self._proposer = proposer or NoProposer()
        self._queue = WaitingQueue()
        self._alive: dict[int, Sequence] = {}
        self._ended: dict[int, Sequence] = {}
        self._batch = RunningBatch(kv_cache.rows)
        self._admissions = 0
        self._explanations = Explanations()
        # True if no waiting sequence fits and nothing has changed since: admission need not be tried again every step.
        self._hopeless = False

    # Queries.

    @property
    def running(self) -> int:
        """Number of running sequences."""
        return len(self._batch)

    @property
    def waiting(self) -> int:
        """Number of sequences in the queue, parked ones included."""
        return len(self._queue)

    @property
    def queue_capacity_left(self) -> int:
        """Number of sequences that can still be queued."""
        return max(0, self._limits.max_waiting - len(self._queue))

    @property
    def has_work(self) -> bool:
        return bool(self._alive)

    def running_sequences(self) -> Iterator[Sequence]:
        """Running sequences, in any order."""
        return iter(self._batch)

    def sequence(self, sequence_id: int) -> Sequence | None:
        """Returns a sequence that is alive, or has ended since the latest plan."""
        return self._alive.get(sequence_id) or self._ended.get(sequence_id)

    # Arrivals and aborts.

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises PromptTooLong or Overloaded, and changes nothing then.

        Prompt and `max_tokens` together are at most `max_model_len`, and the KV cache manager has blocks for that many tokens
        of one sequence in every group: so every queued sequence can run.
        """
        request, sampling = sequence.request, sequence.sampling
        wanted = sequence.prompt_length + sampling.max_tokens
        if wanted > self._max_model_len:
            raise PromptTooLong(tokens=sequence.prompt_length, allowed=self._max_model_len, wanted=sampling.max_tokens)
        if self.queue_capacity_left == 0:
            raise Overloaded(f"The queue is full: {counted(len(self._queue), 'sequence')} (--max-waiting). Try again later.")
        sequence.end_length = wanted
        sequence.stop_length = sequence.prompt_length + sampling.min_tokens
        sequence.stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._eos_ids)
        self._alive[sequence.id] = sequence
        self.kv_cache.open(
            sequence.id,
            sequence.tokens,
            request=request.id,
            tenant=request.tenant,
            salt=request.cache_salt,
            media=request.media_hash,
            retention=None if (hint := request.retention) is None else Retention(hint.priority, hint.seconds),
        )
        self._queue.add(self._policy.rank(sequence, sequence.arrived), sequence)
        self._hopeless = False

    def abort(self, sequence_id: int, now: float) -> bool:
        """End a sequence at once and free its blocks. Returns False where it is not alive any more.

        Between `plan` and `settle` the step still computes it; its tokens are discarded, and a later plan may use its blocks.
        """
        sequence = self._alive.get(sequence_id)
        if sequence is None:
            return False
        if sequence.status is Status.WAITING:
            self._queue.remove(sequence)
            self._hopeless = False  # Another one may be first in the queue now.
        self._end(sequence, "abort", now)
        return True

    # The step.

    def plan(self, now: float) -> StepPlan:
        """Decide the next step, and allocate and free the blocks for it. `now`: seconds on the engine's clock."""
        ended = tuple(self._ended)
        self._ended.clear()
        self.kv_cache.begin_plan()
        news = self.offload.expire(now)
        if self._policy.changes:
            self._queue.sort(lambda sequence: self._policy.rank(sequence, now))
        if any([news, self._queue.wake(self._claim_pending), self._policy.changes]):
            self._hopeless = False
        draft = Draft(self._batch)
        self._secure_decodes(draft, now)
        behind = self._batch.behind()
        draft.any_behind = bool(behind)
        draft.budget = min(self._policy.budget(now), self._limits.max_num_batched_tokens - (len(self._batch) - len(behind)))
        self._feed_behind(behind, draft, now)
        if not draft.short and not self._hopeless:
            self._admit(draft, now)
        if self.offload.plan_made():  # Blocks that were reserved for finished loads may be what another sequence lacked.
            self._hopeless = False
            if not draft.short and not draft.admitted:
                self._admit(draft, now)
        self._guess(draft, now)
        plan = draft.plan(self.kv_cache, ended, *self._explanations.of(self._queue, draft.budget, draft.starved(behind)))
        assert not plan.empty or not self._alive or self.offload.loading, "sequences are alive and none of them makes progress"
        return plan

    def settle(self, plan: StepPlan, outcome: StepOutcome, now: float) -> Settled:
        """Apply the outcome of a step: 0 to `logits` tokens per row, in the plan's order."""
        assert len(outcome.offsets) == plan.rows + 1, "the outcome belongs to another plan"
        batch = self._batch
        tokens, offsets = batch.until_end(outcome.tokens, outcome.offsets)
        kept = np.diff(offsets)
        computed = plan.starts + plan.counts - plan.logits + kept
        begun = batch.first_tokens(kept, now)
        gaps = batch.advance(computed, tokens, offsets, now)
        if commit_rows(self.kv_cache, batch, plan, computed, outcome.failed):
            self._hopeless = False
        finished: dict[int, Finished] = {}
        for row in sorted(outcome.failed.union(batch.ending(kept))):
            one = batch.sequences[row]
            if one is not None and (reason := self._reason_to_end(one, failed=row in outcome.failed)) is not None:
                self._end(one, reason, now)
                finished[row] = Finished(one.id, reason)
        return Settled(kept, finished, tuple(sequence.id for sequence in begun), tuple(gaps))

    def check(self) -> None:
        """Every sequence is in one place, and agrees with the KV cache manager: O(blocks). Raises AssertionError."""
        running = {one.id for one in self._batch}
        assert len(running) == self.running, "a sequence runs twice"
        assert len(running) + len(self._queue) == len(self._alive), "a sequence is lost"
        for sequence in self._alive.values():
            assert (sequence.status is Status.RUNNING) == (sequence.id in running), "a sequence's status is wrong"
            assert (sequence.row is not None) == (sequence.id in running), "a waiting sequence has a row"
            assert 0 <= sequence.computed < len(sequence.tokens) <= sequence.end_length, "a sequence is past its end"
            assert self.kv_cache.row(sequence.id) == sequence.row, "a sequence has another row in the block tables"
        self._batch.check()
        assert self.kv_cache.filling <= {one.id for one in self._batch.behind()}, "a decode still claims what it has computed"
        assert len(running) <= self._limits.max_num_seqs, "more sequences run than may"
        self._queue.check()
        self.offload.check(self._alive.keys() - running)
        self.kv_cache.check()

    # Parts of plan.

    def _secure_decodes(self, draft: Draft, now: float) -> None:
        for row in self._batch.due():
            sequence = self._batch.sequences[row]
            # It may have been preempted for the one before it.
            if sequence is not None:
                self._secure(sequence, sequence.length, draft, now)

    def _secure(self, sequence: Sequence, length: int, draft: Draft, now: float) -> bool:
        """Allocate blocks for `length` tokens, preempting others where none is left. False if it is preempted itself."""
        while self.kv_cache.reach(sequence.id) < length:
            if self.offload.release_for_blocks():
                continue
            draft.short = True
            victim = self._policy.victim(self._batch, now)
            self._preempt(victim, draft, Cause.BLOCKS, now)
            if victim is sequence:
                return False
        self._grow(sequence, length, now)
        return True

    def _grow(self, sequence: Sequence, length: int, now: float) -> None:
        self._batch.capacity[sequence.row] = self.kv_cache.grow(sequence.id, length, now)

    def _feed_behind(self, behind: list[Sequence], draft: Draft, now: float) -> None:
        behind.sort(key=lambda sequence: self._policy.rank(sequence, now))
        for sequence in behind:
            if not draft.short and not self._hopeless:
                self._admit(draft, now, ahead_of=sequence)
            if sequence.status is Status.RUNNING and draft.budget > 0:
                self._feed(sequence, draft, now)

    def _feed(self, sequence: Sequence, draft: Draft, now: float) -> None:
        """Schedule as many tokens as budget and blocks allow; others are preempted only where not even one is possible."""
        count, start = self._count(sequence, draft), sequence.computed
        if start + count > self._batch.capacity[sequence.row]:
            reach = self.kv_cache.reach(sequence.id)
            if not self._secure(sequence, min(start + count, max(reach, start + 1)), draft, now):
                return
        draft.schedule(sequence, min(count, int(self._batch.capacity[sequence.row]) - start))

    def _count(self, sequence: Sequence, draft: Draft) -> int:
        most = self._limits.long_prefill_token_threshold or draft.budget
        return min(sequence.pending, draft.budget, most)

    def _preempt(self, sequence: Sequence, draft: Draft, cause: Cause, now: float) -> None:
        """Free the blocks, whose content stays cached. The sequence returns to its place in the queue."""
        draft.preempt(sequence, cause)
        self._stop(sequence)
        sequence.status = Status.WAITING
        sequence.preemptions += 1
        self._queue.add(self._policy.rank(sequence, now), sequence)

    def _guess(self, draft: Draft, now: float) -> None:
        """Schedule guesses with the rest of the step's tokens, in free blocks: they preempt nothing."""
        if isinstance(self._proposer, NoProposer):
            return
        left = self._limits.max_num_batched_tokens - draft.tokens
        for sequence in draft.decoding():
            start = sequence.computed
            limit = min(left, self.kv_cache.max_chunk - 1, sequence.end_length - sequence.length - 1)
            limit = min(limit, self.kv_cache.reach(sequence.id) - sequence.length)
            guesses = tuple(self._proposer.propose(sequence, limit)[:limit]) if limit > 0 else ()
            if guesses:
                self._grow(sequence, start + 1 + len(guesses), now)
                draft.guess(sequence, guesses)
                left -= len(guesses)

    # Admission.

    def _admit(self, draft: Draft, now: float, ahead_of: Sequence | None = None) -> None:
        """Admit from the queue while budget is left; with `ahead_of`, only those for which that running one is preempted.

        A sequence that does not fit may be passed by up to `look_past` others, but not more than `look_past_limit` times.
        """
        blocked: list[Sequence] = []
        place, queue = 0, self._queue
        self._explanations.clear()
        while place < queue.ready and draft.budget > 0 and len(blocked) <= self._limits.look_past:
            sequence = queue.at(place)
            if ahead_of is not None and not self._policy.may_preempt(sequence, ahead_of, now):
                return
            if any(one.passed_over >= self._limits.look_past_limit for one in blocked):
                self._explanations.put_off(sequence)
                break
            if draft.is_preempted(sequence):
                self._explanations.put_off(sequence)
                return  # It was preempted in this step, and those behind it are not more urgent.
            limit = sequence.hit_limit
            match = self.kv_cache.match(sequence.id, limit)
            claim = self._claim(sequence, match, limit, now)
            if claim is not None:
                queue.park(place, claim)
            elif self._secure_admission(sequence, match, draft, now):
                self._start(queue.pop(place), match, draft, now)
                self._explanations.remove(sequence)
                for one in blocked:
                    one.passed_over += 1
            else:
                blocked.append(sequence)
                place += 1
        self._hopeless = ahead_of is None and draft.budget > 0

    def _claim(self, sequence: Sequence, match: PrefixMatch | None, limit: int, now: float) -> Hashable | None:
        """Returns what the sequence should wait for: blocks that are being computed or loaded."""
        if (key := self.kv_cache.blocker(sequence.id, match, limit)) is not None:
            return PrefixInFlight(key)
        return self.offload.begin(sequence, match, limit, now)

    def _claim_pending(self, claim: Hashable) -> bool:
        """True if sequences that wait for this must wait longer."""
        return self.kv_cache.claimed(claim.key) if isinstance(claim, PrefixInFlight) else self.offload.has(claim)

    def _secure_admission(self, sequence: Sequence, match: PrefixMatch | None, draft: Draft, now: float) -> bool:
        """Returns whether the sequence can be admitted; less urgent ones are preempted for it, if that suffices."""
        if (shortage := self.kv_cache.shortage(sequence.id, match)) is None:
            return True
        self._explanations.block(sequence, shortage)
        rivals = [one for one in self._batch if self._policy.may_preempt(sequence, one, now)]
        rivals.sort(key=lambda one: self._policy.rank(one, now), reverse=True)

        def suffices(count: int) -> bool:
            return self.kv_cache.shortage(sequence.id, match, [one.id for one in rivals[:count]]) is None

        if not rivals or not suffices(len(rivals)):
            return False
        # The more sequences are preempted, the more blocks are free.
        fewest = bisect_left(range(1, len(rivals) + 1), True, key=suffices) + 1
        for rival in rivals[:fewest]:
            self._preempt(rival, draft, Cause.POLICY, now)
        return True

    def _start(self, sequence: Sequence, match: PrefixMatch | None, draft: Draft, now: float) -> None:
        # A preempted sequence resumes: its newest token is a decode, not part of a prompt.
        target = sequence.length - 1 if sequence.output_count else sequence.length
        admission = self.kv_cache.admit(sequence.id, match, target, now)
        self._admissions += 1
        sequence.status, sequence.admission = Status.RUNNING, self._admissions
        loaded = self.offload.admitted(sequence.id, match)
        if sequence.cached_tokens is None:
            sequence.loaded_tokens = loaded
            sequence.cached_tokens, sequence.admitted = admission.matched, now
            self.prefix_queries += sequence.prompt_length
            self.prefix_hits += admission.matched
        self._batch.add(sequence, admission.row, admission.matched)
        count = self._count(sequence, draft)
        self._grow(sequence, admission.matched + count, now)
        draft.schedule(sequence, count)
        draft.copies += admission.copies
        draft.admitted.append(sequence.id)

    # Parts of settle.

    def _reason_to_end(self, sequence: Sequence, *, failed: bool) -> FinishReason | None:
        """Returns why the sequence ends: its newest token, or logits that were not finite. None if it does not end."""
        if failed:
            self.kv_cache.invalidate(sequence.id)
            return "error"
        reason = sequence.end_reason(sequence.tokens[-1], sequence.length)
        sequence.stop_token = sequence.tokens[-1] if reason == "stop" else None
        return reason

    def _end(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        if sequence.status is Status.RUNNING:
            self._stop(sequence)
        self.offload.dropped(sequence.id)
        self._explanations.remove(sequence)
        self.kv_cache.close(sequence.id, now)
        del self._alive[sequence.id]
        self._ended[sequence.id] = sequence
        sequence.status, sequence.finish_reason = Status.FINISHED, reason

    def _stop(self, sequence: Sequence) -> None:
        """The sequence runs no more: blocks and row are free."""
        self.kv_cache.release(sequence.id, sequence.computed)
        self._batch.remove(sequence)
        self._hopeless = False
