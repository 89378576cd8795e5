"""Where sequences and blocks meet: which tokens the next step computes, and what its outcome changes.

There are no phases. A sequence has a length and a computed count, and every step lets computed catch up with length:

    plan    1. decodes: every running sequence with one pending token gets it, and a block where it needs one
            2. prefills: running sequences that are further behind, oldest admitted first, as far as the token budget goes
            3. admissions: waiting sequences, in the queue's order, as far as budget, rows and blocks go
    settle  computed advances, tokens are appended, who is done is released, blocks that became whole are registered

When no block is left, the newest admitted (under `priority`: the least urgent) gives way: its blocks go, its tokens stay, and
it returns to its place in the queue. So the oldest admitted always makes progress, and finishes; then the next is the oldest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from kveik.cache.eviction.policy import Retention
from kveik.cache.kv_cache_manager import KVCacheManager
from kveik.cache.prefix_match import PrefixMatch
from kveik.config import ScheduleConfig
from kveik.errors import Overloaded, PromptTooLong
from kveik.offload.loads import Loads
from kveik.request.sequence import FinishReason, Sequence, Status
from kveik.schedule.draft import Draft
from kveik.schedule.plan import Chunk, Settled, StepOutcome, StepPlan
from kveik.schedule.policy import policy_for
from kveik.schedule.rows import line_up
from kveik.schedule.running_batch import RunningBatch
from kveik.schedule.tally import Tally
from kveik.schedule.waiting_queue import WaitingQueue


class Scheduler:
    """Decides steps. Single-threaded; `plan` and `settle` alternate, `add` and `abort` come between any two calls."""

    def __init__(
        self,
        kv_cache: KVCacheManager,
        limits: ScheduleConfig,
        max_model_len: int,
        eos_ids: frozenset[int] = frozenset(),
        below: Loads | None = None,
    ) -> None:
        """The KV cache manager was made for these limits: its rows, context and largest chunk bound what is decided here.
        `below`: loads from the tiers below the pool, where there are any.
        """
        assert kv_cache.rows <= limits.max_num_seqs, "the KV cache manager has more rows than sequences may run"
        assert max_model_len <= kv_cache.max_model_len, "the KV cache manager's tables are shorter than the context"
        cap = limits.long_prefill_token_threshold or limits.prefill_chunk_size
        largest = min(limits.prefill_chunk_size, limits.max_num_batched_tokens, cap, max_model_len)
        assert largest <= kv_cache.max_chunk, "the KV cache manager's windowed groups count with smaller chunks"
        self.kv_cache = kv_cache
        self.below = Loads(kv_cache) if below is None else below
        self.prefix_queries = 0
        """Prompt tokens of all sequences admitted so far, each sequence counted once."""

        self.prefix_hits = 0
        """Those of them that were found in the cache."""

        self._limits = limits
        self._max_model_len = max_model_len
        self._eos_ids = eos_ids
        self._policy = policy_for(limits)
        self._line = WaitingQueue()
        self._alive: dict[int, Sequence] = {}
        self._ended: dict[int, Sequence] = {}
        self._decodes = RunningBatch(kv_cache.rows)
        self._prefills: dict[int, Sequence] = {}
        self._admissions = 0
        # True while nothing has changed since an admission pass found nobody who fits: no need to try again every step.
        self._hopeless = False

    # Questions.

    @property
    def running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._decodes) + len(self._prefills)

    @property
    def waiting(self) -> int:
        """Sequences in the queue, those that wait for another's blocks included."""
        return len(self._line)

    @property
    def room(self) -> int:
        """Sequences that the queue still takes."""
        return max(0, self._limits.max_waiting - len(self._line))

    @property
    def has_work(self) -> bool:
        return bool(self._alive)

    def running_sequences(self) -> Iterator[Sequence]:
        """All that hold blocks, in no promised order."""
        yield from self._decodes.values()
        yield from self._prefills.values()

    def sequence(self, sequence_id: int) -> Sequence | None:
        """A sequence that is alive, or has ended since the latest plan."""
        return self._alive.get(sequence_id) or self._ended.get(sequence_id)

    # From outside.

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises PromptTooLong or Overloaded, and has changed nothing then.

        Prompt and `max_tokens` together are at most `max_model_len`, and the KV cache manager has blocks for that many tokens
        of one sequence in every group: so whatever is queued can run.
        """
        request, sampling = sequence.request, sequence.sampling
        wanted = sequence.prompt_length + sampling.max_tokens
        if wanted > self._max_model_len:
            raise PromptTooLong(
                tokens=sequence.prompt_length, allowed=self._max_model_len, wanted=sampling.max_tokens, param="max_tokens"
            )
        if self.room == 0:
            raise Overloaded(f"The queue is full; sequences in it: {len(self._line)} (--max-waiting).")
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
        self._line.add(self._policy.order(sequence), sequence)
        self._hopeless = False

    def abort(self, sequence_id: int, now: float) -> bool:
        """End a sequence at once and free its blocks. False where it is not alive any more.

        Between `plan` and `settle` the step still computes it; its token is dropped, and a later plan may use its blocks.
        """
        sequence = self._alive.get(sequence_id)
        if sequence is None:
            return False
        if sequence.status is Status.WAITING:
            self._line.remove(self._policy.order(sequence), sequence)
            self._hopeless = False  # Somebody else may be first in line now.
        self._end(sequence, "abort", now)
        return True

    # The step.

    def plan(self, now: float) -> StepPlan:
        """Decide the next step, and take and give the blocks for it. `now`: seconds on the engine's clock."""
        self._ended.clear()
        self.below.expire(now)
        if any([self.below.take_news(), self._line.parked and self._line.wake(self._awaited)]):
            self._hopeless = False
        draft = Draft(now, budget=0)
        self._secure_decodes(draft)
        draft.budget = min(self._limits.prefill_chunk_size, self._limits.max_num_batched_tokens - len(self._decodes))
        self._feed_prefills(draft)
        if not draft.short and not self._hopeless:
            self._admit(draft)
        if self.below.tidy():  # What was held for those who loaded may be what another one lacked.
            self._hopeless = False
            if not draft.short and not draft.admitted:
                self._admit(draft)
        line_up(self.kv_cache, self._alive, self._decodes, draft.counts)
        plan = draft.plan(self._decodes.decodes())
        assert not plan.empty or not self._alive or self.below.loading, "sequences are alive and none of them makes progress"
        return plan

    def settle(self, plan: StepPlan, outcome: StepOutcome, now: float) -> Settled:
        """Take over what the step brought; the outcome has one token per chunk that samples, in the plan's order."""
        assert len(outcome.tokens) == len(plan.sampling_ids), "the outcome is not this plan's"
        tally = Tally(now)
        self._settle_decodes(plan.decodes, outcome, tally)
        self._settle_prefills(plan, outcome, tally)
        return tally.settled()

    def check(self) -> None:
        """Every sequence is in one place, and agrees with the KV cache manager: O(blocks). Raises AssertionError."""
        running = {one.id for one in self.running_sequences()}
        assert len(running) == self.running, "a sequence runs twice"
        assert len(running) + len(self._line) == len(self._alive), "a sequence is lost"
        for sequence in self._alive.values():
            assert (sequence.status is Status.RUNNING) == (sequence.id in running)
            assert (sequence.row is not None) == (sequence.id in running)
            assert 0 <= sequence.computed < len(sequence.tokens) <= sequence.end_length
            assert sequence.computed <= sequence.capacity
        self._decodes.check()
        assert self.kv_cache.filling <= self._prefills.keys(), "a decode still claims or reserves what it has computed"
        assert len(running) <= self._limits.max_num_seqs
        self._line.check()
        self.below.check(self._alive.keys() - running)
        self.kv_cache.check()

    # Parts of plan.

    def _secure_decodes(self, draft: Draft) -> None:
        decodes = self._decodes
        for place in decodes.due():
            sequence = decodes.sequences[place]
            # It may have given way to the one before it.
            if sequence is not None and self._secure(sequence, sequence.computed + 1, draft):
                decodes.give_room(place, sequence.capacity)

    def _secure(self, sequence: Sequence, length: int, draft: Draft) -> bool:
        """GroupCapacity for `length` tokens, from whoever must give way; False where that is the sequence itself."""
        while self.kv_cache.reach(sequence.id) < length:
            if self.below.give_way():
                continue
            draft.short = True
            victim = self._policy.victim(self.running_sequences())
            self._preempt(victim, draft)
            if victim is sequence:
                return False
        sequence.capacity = self.kv_cache.grow(sequence.id, length, draft.now)
        return True

    def _feed_prefills(self, draft: Draft) -> None:
        for sequence in self._policy.feeding_order(self._prefills.values()):
            if not draft.short and not self._hopeless:
                self._admit(draft, ahead_of=sequence)
            if sequence.status is Status.RUNNING and draft.budget > 0:
                self._feed(sequence, draft)

    def _feed(self, sequence: Sequence, draft: Draft) -> None:
        """As many tokens as budget and blocks allow; others give way only where not even one is possible."""
        count = self._count(sequence, draft)
        start = sequence.computed
        if start + count > sequence.capacity:
            reach = self.kv_cache.reach(sequence.id)
            if not self._secure(sequence, min(start + count, max(reach, start + 1)), draft):
                return
        draft.give(sequence, min(count, sequence.capacity - start))

    def _count(self, sequence: Sequence, draft: Draft) -> int:
        most = self._limits.long_prefill_token_threshold or draft.budget
        return min(sequence.pending, draft.budget, most)

    def _preempt(self, sequence: Sequence, draft: Draft) -> None:
        """Take the blocks; what was computed can be found again. The sequence returns to its place in the queue."""
        self._stop(sequence)
        draft.take_back(sequence)
        sequence.status, sequence.computed = Status.WAITING, 0
        sequence.preemptions += 1
        self._line.add(self._policy.order(sequence), sequence)

    # Admission.

    def _admit(self, draft: Draft, ahead_of: Sequence | None = None) -> None:
        """Admit from the queue while there is budget; with `ahead_of`, only those before whom that running one must give way.

        Whoever does not fit may be passed by up to `look_past` others, but not more than `look_past_limit` times.
        """
        blocked: list[Sequence] = []
        place, line = 0, self._line
        while place < line.ready and draft.budget > 0 and len(blocked) <= self._limits.look_past:
            sequence = line.at(place)
            if ahead_of is not None and not self._policy.may_displace(sequence, ahead_of):
                return
            if any(one.passed_over >= self._limits.look_past_limit for one in blocked):
                break
            if sequence.id in draft.preempted:
                return  # It gave way in this very step, and those behind it are no more urgent.
            limit = sequence.hit_limit
            match = self.kv_cache.match(sequence.id, limit)
            claim = self.kv_cache.blocker(sequence.id, match, limit) or self.below.blocker(sequence, match, limit)
            if claim is None:
                claim = self.below.begin(sequence, match, limit, draft.now)
            if claim is not None:
                line.park(place, claim)
            elif self._make_room(sequence, match, draft):
                self._start(line.leave(place), match, draft)
                for one in blocked:
                    one.passed_over += 1
            else:
                blocked.append(sequence)
                place += 1
        self._hopeless = ahead_of is None and draft.budget > 0

    def _awaited(self, claim: bytes) -> bool:
        """Whether whoever waits for this has to wait on."""
        return self.kv_cache.claimed(claim) or self.below.claimed(claim)

    def _make_room(self, sequence: Sequence, match: PrefixMatch | None, draft: Draft) -> bool:
        """Whether the sequence can be admitted; those that must give way for it are preempted, if that suffices."""
        if self.kv_cache.can_admit(sequence.id, match):
            return True
        rivals = [one for one in self.running_sequences() if self._policy.may_displace(sequence, one)]
        rivals.sort(key=self._policy.order, reverse=True)

        def suffices(count: int) -> bool:
            return self.kv_cache.can_admit(sequence.id, match, [one.id for one in rivals[:count]])

        if not rivals or not suffices(len(rivals)):
            return False
        # The more give way, the more room there is.
        fewest = bisect_left(range(1, len(rivals) + 1), True, key=suffices) + 1
        for rival in rivals[:fewest]:
            self._preempt(rival, draft)
        return True

    def _start(self, sequence: Sequence, match: PrefixMatch | None, draft: Draft) -> None:
        # One that was preempted takes up where it was: its newest token is a decode, not part of a prompt.
        target = sequence.length - 1 if sequence.output_count else sequence.length
        admission = self.kv_cache.admit(sequence.id, match, target, draft.now)
        self._admissions += 1
        sequence.status, sequence.row, sequence.admission = Status.RUNNING, admission.row, self._admissions
        sequence.computed = admission.matched
        loaded = self.below.admitted(sequence.id, match)
        if sequence.cached_tokens is None:
            sequence.loaded_tokens = loaded
            sequence.cached_tokens, sequence.admitted = admission.matched, draft.now
            self.prefix_queries += sequence.prompt_length
            self.prefix_hits += admission.matched
        self._prefills[sequence.id] = sequence
        count = self._count(sequence, draft)
        sequence.capacity = self.kv_cache.grow(sequence.id, sequence.computed + count, draft.now)
        draft.give(sequence, count)
        draft.copies += admission.copies
        draft.admitted.append(sequence.id)

    # Parts of settle.

    def _settle_decodes(self, count: int, outcome: StepOutcome, tally: Tally) -> None:
        """The first `count` places, which are the plan's decodes; whoever was aborted meanwhile is a gap there."""
        decodes, tokens = self._decodes, outcome.tokens[:count]
        failed = frozenset(place for place in outcome.failed if place < count)
        tally.gaps += decodes.advance(tokens, failed, tally.now).tolist()
        for place in decodes.whole(count, self.kv_cache.block_size):
            sequence = decodes.sequences[place]
            if sequence is not None and place not in failed and self.kv_cache.commit(sequence.id, sequence.computed):
                self._hopeless = False
        for place in sorted(failed.union(decodes.ending(tokens))):
            sequence = decodes.sequences[place]
            if sequence is not None:
                self._end_where_due(sequence, outcome, place, tally)

    def _settle_prefills(self, plan: StepPlan, outcome: StepOutcome, tally: Tally) -> None:
        if plan.prefills:
            # Blocks may have left windows, and what a prompt was promised until its end is free for others after it.
            self._hopeless = False
        place = plan.decodes
        for chunk in plan.prefills:
            sequence = self._prefills.get(chunk.sequence_id)
            if sequence is not None:  # Otherwise aborted meanwhile.
                self._settle_prefill(sequence, chunk, outcome, place, tally)
            place += chunk.samples

    def _settle_prefill(self, sequence: Sequence, chunk: Chunk, outcome: StepOutcome, place: int, tally: Tally) -> None:
        """`place`: of its token in the outcome, where it has one."""
        sequence.computed = chunk.start + chunk.count
        if not (chunk.samples and place in outcome.failed):
            self.kv_cache.commit(sequence.id, sequence.computed)
            if chunk.samples:
                tally.give(sequence, int(outcome.tokens[place]))
            if sequence.decoding:
                del self._prefills[sequence.id]
                self._decodes.add(sequence)
        if chunk.samples:
            self._end_where_due(sequence, outcome, place, tally)

    def _end_where_due(self, sequence: Sequence, outcome: StepOutcome, place: int, tally: Tally) -> None:
        """End the sequence where its new token is the last, or where it has none because its logits were not finite."""
        token = int(outcome.tokens[place])
        failed = place in outcome.failed
        reason = "error" if failed else sequence.end_reason(token)
        if reason is None:
            return
        if failed:
            self.kv_cache.invalidate(sequence.id)
        elif reason == "stop":
            sequence.stop_token = token
        self._end(sequence, reason, tally.now)
        tally.end(place, sequence, reason)

    def _end(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        if sequence.status is Status.RUNNING:
            self._stop(sequence)
        self.below.dropped(sequence.id)
        self.kv_cache.close(sequence.id, now)
        del self._alive[sequence.id]
        self._ended[sequence.id] = sequence
        sequence.status, sequence.finish_reason = Status.FINISHED, reason

    def _stop(self, sequence: Sequence) -> None:
        """It runs no more: blocks and row go back."""
        self.kv_cache.release(sequence.id, sequence.computed)
        if sequence.id in self._decodes:
            self._decodes.pop(sequence.id)
        else:
            del self._prefills[sequence.id]
        sequence.row, sequence.capacity = None, 0
        self._hopeless = False
