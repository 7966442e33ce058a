"""The engine without its thread: a queue, slots, and a step that plans, runs and commits."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Tokens

from service.engine.batch import DecodeStatus, Runner, Segment
from service.engine.meter import Meter
from service.engine.pacing import Pacer
from service.engine.scheduler import Drafts, Plan, plan
from service.engine.sequence import Sequence
from service.engine.settings import SchedulingSettings, SpeculationSettings
from service.engine.slots import Slot, choose
from service.engine.speculation import Speculation
from service.engine.types import Event, FinishReason, Load, Progress, SlotInfo, Started
from service.errors import Conflict, DeadlineExceeded, EngineFailure, Exhausted, SlotwireError

log = logging.getLogger("slotwire.engine")

Outcome = tuple[str, Event | SlotwireError]
"""A request's id and what happened to it; `Finished` or an error is the last."""

_RETRY_AFTER = 1.0  # seconds; slots turn over faster than anyone could predict from here


class Core:
    """Not thread-safe: one thread calls everything. Nothing here waits, except `step` for the runner."""

    def __init__(
        self,
        runner: Runner,
        settings: SchedulingSettings,
        speculation: SpeculationSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._settings = settings
        self._clock = clock
        self._info = runner.info
        self._slots = [Slot(index) for index in range(self._info.slots)]
        self._queue: deque[Sequence] = deque()
        self._pacer = Pacer(settings.pace, runner.max_rows)
        self._meter = Meter()
        self._speculation: Speculation | None = None
        if speculation is not None and speculation.rows:
            self._speculation = Speculation(speculation, self._info, runner.draft, clock)
        self._checkpoint_seconds = 0.0
        """Of each slot, in the last step that took checkpoints."""
        self._uses = 0
        self._outcomes: list[Outcome] = []

    def calibrate(self) -> None:
        """Measure what speculation has to know. Takes a few dozen decodes; to be called before the first request."""
        if self._speculation is not None:
            self._speculation.calibrate(self._runner)

    # requests

    def submit(self, sequence: Sequence) -> None:
        """Queue a request. With a full queue it is refused: its only outcome is an error."""
        if len(self._queue) >= self._settings.queue:
            sequence.sampler.close()
            error = Exhausted(
                f"{len(self._queue)} requests are waiting; the limit is {self._settings.queue}",
                retry_after=_RETRY_AFTER,
                reason="QUEUE_FULL",
                limit=self._settings.queue,
            )
            self._outcomes.append((sequence.request.id, error))
            return
        self._queue.append(sequence)

    def cancel(self, request_id: str) -> None:
        """Forget a request, wherever it is; what its slot has computed stays for reuse. Unknown ids are ignored."""
        for sequence in self._queue:
            if sequence.request.id == request_id:
                self._queue.remove(sequence)
                sequence.sampler.close()
                return
        for slot, sequence in self._busy():
            if sequence.request.id == request_id:
                self._release(slot)
                return

    def fail_all(self, error: SlotwireError) -> None:
        """End every request with `error` and empty every slot."""
        while self._queue:
            sequence = self._queue.popleft()
            sequence.sampler.close()
            self._outcomes.append((sequence.request.id, error))
        for slot in self._slots:
            if slot.sequence is not None:
                self._fail(slot, error)
            self._clear(slot)

    def take_outcomes(self) -> list[Outcome]:
        """What happened since the last call, in order."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    # slots

    def slots(self) -> list[SlotInfo]:
        return [slot.info(self._info.slot_context) for slot in self._slots]

    def erase(self, slot_id: int) -> int:
        """Empty an idle slot; returns how many tokens it held. Raises Conflict where it is busy."""
        slot = self._slots[slot_id]
        if slot.busy:
            raise Conflict(f"slot {slot_id} is busy", reason="SLOT_BUSY", slot=slot_id)
        count = len(slot.tokens)
        self._clear(slot)
        slot.session, slot.cache_key = None, ""
        return count

    def load(self) -> Load:
        return self._meter.load(
            slots=len(self._slots),
            busy_slots=sum(slot.busy for slot in self._slots),
            queued_requests=len(self._queue),
            queue_limit=self._settings.queue,
            cached_tokens=sum(len(slot.tokens) for slot in self._slots),
            context_tokens=self._info.context,
        )

    # a step

    def step(self) -> bool:
        """Plan, run and commit once. Returns False where there was nothing to do."""
        began = self._clock()
        self._expire(began)
        self._admit(began)
        drafts = self._draft()
        drafted = self._clock()
        work = self._run(drafts)
        if not work.segments:
            return False
        drawn = self._commit(work, self._clock())
        if self._speculation is not None:
            self._speculation.tempo.target.observe(work.rows, self._clock() - drafted)
            self._meter.draft(drafted - began)
            self._follow(self._speculation, work)
        seconds = self._clock() - began
        self._pacer.observe(work.generating, work.prompt_rows, seconds)
        self._meter.step(work.rows, work.prompt_rows, drawn, seconds)
        return True

    def _expire(self, now: float) -> None:
        """End the requests whose time is over, in the queue and in the slots."""
        for sequence in [s for s in self._queue if _over(s, now)]:
            self._queue.remove(sequence)
            sequence.sampler.close()
            self._outcomes.append((sequence.request.id, _end_of_time(sequence, now)))
        for slot, sequence in list(self._busy()):
            if _over(sequence, now):
                outcome = _end_of_time(sequence, now)
                if isinstance(outcome, SlotwireError):
                    self._fail(slot, outcome)
                else:
                    self._finish(slot, sequence, FinishReason.TIME_LIMIT, now)

    def _admit(self, now: float) -> None:
        """Give slots to those who can have one, in the order of their arrival."""
        for sequence in list(self._queue):
            if all(slot.busy for slot in self._slots) or not self._fits(sequence):
                return  # nobody overtakes a prompt that waits for room
            slot = choose(self._slots, sequence.request)
            if slot is not None:
                self._queue.remove(sequence)
                self._start(slot, sequence, now)

    def _fits(self, sequence: Sequence) -> bool:
        """Whether the prompt has room beside the busy slots; if not, it waits rather than being cut off later."""
        if self._info.capabilities.recurrent:  # a state of constant size for each slot
            return True
        busy = sum(max(slot.length, len(s.request.tokens)) + 1 for slot, s in self._busy())
        return busy + len(sequence.request.tokens) < self._info.context or not busy

    def _start(self, slot: Slot, sequence: Sequence, now: float) -> None:
        request = sequence.request
        slot.replay.clear()  # where it is a part of the prompt, it is computed as one
        reused = slot.common_prefix(request)
        if reused < len(slot.tokens):
            reused = self._runner.keep(slot.id, reused)
            del slot.tokens[reused:]
        self._uses += 1
        slot.used, slot.last_used = self._uses, time.time()
        slot.session, slot.cache_key, slot.sequence = request.session, request.cache_key, sequence
        sequence.start(reused, now)
        if self._speculation is not None:
            self._speculation.open(slot, request)
        self._meter.request(reused)
        self._outcomes.append((request.id, Started(slot.id, len(request.tokens), reused)))

    def _draft(self) -> Drafts:
        """What the generating slots draft for this step."""
        generating = [slot for slot, sequence in self._busy() if sequence.pending is not None]
        if self._speculation is None or not generating:
            return {}
        prompt_rows = self._prompt_rows(len(generating))
        replays = sum(len(slot.replay) for slot in self._slots)
        room = self._runner.max_rows - len(generating) - replays - min(prompt_rows, 1)
        room = min(room, self._runner.max_outputs - len(self._slots))
        return self._speculation.draft(generating, prompt_rows, room) if room > 0 else {}

    def _prompt_rows(self, generating: int) -> int:
        """The most rows of prompts that fit the pace; 0 where no prompt is being processed."""
        prompts = any(sequence.pending is None for _, sequence in self._busy())
        rows = self._pacer.prompt_rows(generating, prompts)
        return rows if prompts else 0

    def _run(self, drafts: Drafts) -> Plan:
        """Decode the next batch; where the cache is full, make room and plan again."""
        generating = sum(sequence.pending is not None for _, sequence in self._busy())
        prompt_rows = self._prompt_rows(generating)
        while True:
            work = plan(self._slots, prompt_rows, self._runner.max_rows, drafts)
            if not work.segments:
                return work
            self._checkpoint(work)
            began = self._clock()
            status = self._runner.decode(work.segments)
            self._meter.decode(self._clock() - began)
            if status is DecodeStatus.OK:
                return work
            if status is not DecodeStatus.NO_ROOM:
                self._drop_batch(work.segments)
            elif drafts and self._speculation is not None:
                self._speculation.cancel()  # drafts are no reason to take room from anyone
                drafts = {}
            else:
                self._make_room()

    def _checkpoint(self, work: Plan) -> None:
        """Remember where the slots are whose drafts may be rejected."""
        rounds = [segment for segment in work.segments if segment.outputs > 1]
        if not rounds:
            return
        began = self._clock()
        self._meter.checkpoints(sum(self._runner.checkpoint(segment.slot) for segment in rounds))
        self._checkpoint_seconds = (self._clock() - began) / len(rounds)

    def _make_room(self) -> None:
        """Empty the idle slot that was used longest ago; with none left, end the newest request."""
        idle = [slot for slot in self._slots if slot.tokens and not slot.busy]
        if idle:
            slot = min(idle, key=lambda slot: slot.used)
            log.info("evict slot %d: %d tokens, the cache is full", slot.id, len(slot.tokens))
            self._clear(slot)
            return
        newest = max((slot for slot, _ in self._busy()), key=lambda slot: slot.used)
        error = Exhausted(
            f"the context of {self._info.context} tokens is full, and this is the newest of the running requests",
            retry_after=_RETRY_AFTER,
            reason="CACHE_FULL",
            context_tokens=self._info.context,
        )
        self._fail(newest, error)
        self._clear(newest)

    def _drop_batch(self, segments: list[Segment]) -> None:
        """The library failed: those who were in the batch cannot go on, the others can."""
        for segment in segments:
            slot = self._slots[segment.slot]
            if slot.busy:
                self._fail(slot, EngineFailure("the model failed to compute this request", reason="DECODE_FAILED"))
            self._clear(slot)

    def _commit(self, work: Plan, now: float) -> int:
        """Take over what was computed; returns how many tokens were drawn."""
        output = drawn = 0
        for segment in work.segments:
            slot = self._slots[segment.slot]
            replayed = min(len(slot.replay), len(segment.tokens))
            del slot.replay[:replayed]
            slot.tokens.extend(segment.tokens)
            self._meter.replay(replayed)
            sequence = slot.sequence
            if sequence is None:  # an idle slot whose memory is complete now
                continue
            sequence.tally.replayed += replayed
            if sequence.pending is None and sequence.request.progress:
                progress = Progress(len(slot.tokens), len(sequence.request.tokens))
                self._outcomes.append((sequence.request.id, progress))
            if segment.outputs:
                drawn += self._advance(slot, sequence, segment, output, now)
                output += segment.outputs
        return drawn

    def _follow(self, speculation: Speculation, work: Plan) -> None:
        """Let the draft model read what was computed of prompts."""
        busy = sum(slot.busy for slot in self._slots)
        for segment in work.segments[work.generating :]:
            speculation.follow(self._slots[segment.slot], busy)

    def _advance(self, slot: Slot, sequence: Sequence, segment: Segment, output: int, now: float) -> int:
        """Draw the tokens of a slot, as long as they are those of its draft, and see where that leads.

        `output` is the index of the segment's first row with an output. Returns how many tokens were drawn.
        """
        draft = segment.tokens[len(segment.tokens) - segment.outputs + 1 :]
        length = len(slot.tokens) - len(draft)  # of the memory, as far as it is certain
        drawn: list[int] = []
        reason: FinishReason | None = None
        failure: SlotwireError | None = None
        for row in range(segment.outputs):
            logits = self._runner.logits(output + row)
            try:
                token = sequence.sampler.draw(logits)
            except SlotwireError as error:
                failure = error
                break
            drawn.append(token)
            delta, reason = sequence.take(token, logits, self._runner.pieces, self._runner.end_tokens, now)
            if delta is not None:
                self._outcomes.append((sequence.request.id, delta))
            if reason is None and length >= self._info.slot_context:
                reason = FinishReason.CONTEXT_FULL
            if reason is not None or row == len(draft) or token != draft[row]:
                break
            length += 1
        self._settle(slot, sequence, draft, drawn, length)
        if failure is not None:
            self._fail(slot, failure)
        elif reason is not None:
            self._finish(slot, sequence, reason, now)
        return len(drawn)

    def _settle(self, slot: Slot, sequence: Sequence, draft: Tokens[int], drawn: Tokens[int], length: int) -> None:
        """A round is over: `length` tokens of the slot's memory are of use, the rest was rejected."""
        accepted = 0
        if draft:
            accepted = sum(token == proposed for token, proposed in zip(drawn, draft, strict=False))
            sequence.tally.round(len(draft), accepted)
            self._meter.round(len(draft), accepted)
        began = self._clock()
        if length < len(slot.tokens):
            kept = self._runner.keep(slot.id, length)
            slot.replay = slot.tokens[kept:length]
            del slot.tokens[kept:]
        if self._speculation is not None:
            if draft:
                self._speculation.observe_overhead(self._checkpoint_seconds + self._clock() - began)
            self._speculation.settle(slot, drawn, len(draft), accepted)

    # endings

    def _finish(self, slot: Slot, sequence: Sequence, reason: FinishReason, now: float) -> None:
        rest = sequence.flush()
        if rest is not None:
            self._outcomes.append((sequence.request.id, rest))
        self._outcomes.append((sequence.request.id, sequence.finished(reason, now)))
        self._release(slot)

    def _fail(self, slot: Slot, error: SlotwireError) -> None:
        assert slot.sequence is not None
        self._outcomes.append((slot.sequence.request.id, error))
        self._release(slot)

    def _release(self, slot: Slot) -> None:
        assert slot.sequence is not None
        slot.sequence.sampler.close()
        slot.last_sequence, slot.sequence = slot.sequence, None
        slot.last_used = time.time()
        if self._speculation is not None:
            self._speculation.close(slot)

    def _clear(self, slot: Slot) -> None:
        self._runner.keep(slot.id, 0)  # also where no tokens are known: a failed decode may have left some
        slot.tokens.clear()
        slot.replay.clear()
        if self._speculation is not None:
            self._speculation.forget(slot)

    def _busy(self) -> Iterator[tuple[Slot, Sequence]]:
        for slot in self._slots:
            if slot.sequence is not None:
                yield slot, slot.sequence


def _over(sequence: Sequence, now: float) -> bool:
    request = sequence.request
    return (request.deadline_at is not None and now >= request.deadline_at) or (
        request.time_limit_at is not None and now >= request.time_limit_at
    )


def _end_of_time(sequence: Sequence, now: float) -> Event | SlotwireError:
    """The caller's deadline is an error, the time limit an end."""
    request = sequence.request
    if request.deadline_at is not None and now >= request.deadline_at:
        return DeadlineExceeded("the deadline passed")
    return sequence.finished(FinishReason.TIME_LIMIT, now)
