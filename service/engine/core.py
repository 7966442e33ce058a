"""The engine without its thread: a queue, slots, and a step that plans, runs and commits."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Tokens

from service.engine.batch import DecodeStatus, Runner, Segment
from service.engine.meter import Meter
from service.engine.pacing import Pacer
from service.engine.scheduler import Drafts, Plan, plan
from service.engine.seats import RETRY_AFTER, Rooms, Seats
from service.engine.sequence import Sequence
from service.engine.settings import SchedulingSettings, SpeculationSettings
from service.engine.shelf import Shelf
from service.engine.slots import Slot, choose
from service.engine.speculation import Speculation
from service.engine.types import Event, FinishReason, Load, Paused, Progress, SlotContents, SlotInfo, Started
from service.errors import DeadlineExceeded, EngineFailure, Exhausted, SlotwireError

log = logging.getLogger("slotwire.engine")

Outcome = tuple[str, Event | SlotwireError]
"""A request's id and what happened to it; `Finished` or an error is the last."""


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
        self._queue: deque[Sequence] = deque()
        self._pacer = Pacer(settings.pace, runner.max_rows)
        self._meter = Meter()
        self._speculation: Speculation | None = None
        if speculation is not None and speculation.rows:
            self._speculation = Speculation(speculation, self._info, runner.draft, clock)
        self._shelf = Shelf(settings.cache_memory, whole=not self._info.capabilities.trim)
        self._seats = Seats(runner, self._speculation, self._shelf)
        self._slots = self._seats.slots
        self._pausing = self._info.capabilities.context_checkpoints
        self._checkpoint_seconds = 0.0
        """Of each slot, in the last step that took checkpoints."""
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
                retry_after=RETRY_AFTER,
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
        for slot, sequence in self._seats.busy():
            if sequence.request.id == request_id:
                self._seats.release(slot)
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
            self._seats.clear(slot)

    def take_outcomes(self) -> list[Outcome]:
        """What happened since the last call, in order."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    # slots

    def slots(self) -> list[SlotInfo]:
        return [slot.info(self._info.slot_context) for slot in self._slots]

    def erase(self, slot_id: int) -> int:
        """Empty an idle slot; returns how many tokens it held. Raises Conflict where it is busy."""
        return self._seats.erase(slot_id)

    def state_sizes(self, slot_id: int) -> tuple[int, int]:
        """Bytes of a slot's states, of the target and of the draft model."""
        return self._seats.state_sizes(slot_id)

    def contents(self, slot_id: int, *, with_draft: bool = True, rooms: Rooms = (None, None)) -> SlotContents:
        """What a slot holds, busy or not; see `Seats.contents`."""
        return self._seats.contents(slot_id, with_draft=with_draft, rooms=rooms)

    def put(self, slot_id: int | None, contents: SlotContents) -> tuple[int, bool]:
        """Replace what an idle slot holds; see `Seats.put`. None takes one that can be spared. Returns its id, too."""
        slot_id = self._seats.spare(contents.session) if slot_id is None else slot_id
        return slot_id, self._seats.put(slot_id, contents)

    def samples(self) -> tuple[memoryview, memoryview | None]:
        """States of the target and the draft model that show how theirs are made up; see `Seats.samples`."""
        return self._seats.samples()

    def paused(self, slot_id: int) -> Paused:
        """The generation that was restored with a slot. Raises Conflict where there is none, or the slot is busy."""
        return self._seats.paused(slot_id)

    def load(self) -> Load:
        return self._meter.load(
            slots=len(self._slots),
            busy_slots=sum(slot.busy for slot in self._slots),
            queued_requests=len(self._queue),
            queue_limit=self._settings.queue,
            cached_tokens=sum(len(slot.tokens) for slot in self._slots),
            context_tokens=self._info.context,
            shelved_states=len(self._shelf),
            shelved_bytes=self._shelf.bytes,
            fetched_tokens=self._seats.fetched,
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
        for slot, sequence in list(self._seats.busy()):
            if _over(sequence, now):
                outcome = _end_of_time(sequence, now)
                if isinstance(outcome, SlotwireError):
                    self._fail(slot, outcome)
                else:
                    self._finish(slot, sequence, FinishReason.TIME_LIMIT, now)

    def _admit(self, now: float) -> None:
        """Give slots to those who can have one, in the order of their arrival."""
        for sequence in list(self._queue):
            if all(slot.busy for slot in self._slots) or not self._seats.fits(sequence):
                return  # nobody overtakes a prompt that waits for room
            slot = choose(self._slots, sequence)
            if slot is not None:
                self._queue.remove(sequence)
                reused = self._seats.seat(slot, sequence, now)
                self._meter.request(reused)
                request = sequence.request
                self._outcomes.append((request.id, Started(slot.id, len(request.tokens), reused)))

    def _draft(self) -> Drafts:
        """What the generating slots draft for this step."""
        generating = self._seats.generating()
        if self._speculation is None or not generating:
            return {}
        prompt_rows = self._prompt_rows(len(generating))
        replays = sum(len(slot.replay) for slot in self._slots)
        room = self._runner.max_rows - len(generating) - replays - min(prompt_rows, 1)
        room = min(room, self._runner.max_outputs - len(self._slots))
        return self._speculation.draft(generating, prompt_rows, room) if room > 0 else {}

    def _prompt_rows(self, generating: int) -> int:
        """The most rows of prompts that fit the pace; 0 where no prompt is being processed."""
        prompts = any(sequence.pending is None for _, sequence in self._seats.busy())
        rows = self._pacer.prompt_rows(generating, prompts)
        return rows if prompts else 0

    def _run(self, drafts: Drafts) -> Plan:
        """Decode the next batch; where the cache is full, make room and plan again."""
        prompt_rows = self._prompt_rows(len(self._seats.generating()))
        while True:
            work = plan(self._slots, prompt_rows, self._runner.max_rows, drafts, pausing=self._pausing)
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
        if self._seats.evict():
            return
        newest = max((slot for slot, _ in self._seats.busy()), key=lambda slot: slot.used)
        error = Exhausted(
            f"the context of {self._info.context} tokens is full, and this is the newest of the running requests",
            retry_after=RETRY_AFTER,
            reason="CACHE_FULL",
            context_tokens=self._info.context,
        )
        self._fail(newest, error)
        self._seats.clear(newest)

    def _drop_batch(self, segments: list[Segment]) -> None:
        """The library failed: those who were in the batch cannot go on, the others can."""
        for segment in segments:
            slot = self._slots[segment.slot]
            if slot.busy:
                self._fail(slot, EngineFailure("the model failed to compute this request", reason="DECODE_FAILED"))
            self._seats.clear(slot)

    def _commit(self, work: Plan, now: float) -> int:
        """Take over what was computed; returns how many tokens were drawn."""
        output = drawn = 0
        for segment in work.segments:
            replayed = self._seats.add(segment)
            self._meter.replay(replayed)
            slot = self._slots[segment.slot]
            sequence = slot.sequence
            if sequence is None:  # an idle slot whose memory is complete now
                continue
            sequence.tally.replayed += replayed
            if sequence.pending is None:
                self._read(slot, sequence, now)
            if segment.outputs:
                drawn += self._advance(slot, sequence, segment, output, now)
                output += segment.outputs
        return drawn

    def _read(self, slot: Slot, sequence: Sequence, now: float) -> None:
        """A part of a prompt was computed."""
        sequence.read(len(slot.tokens), now)
        if sequence.request.progress:
            progress = Progress(len(slot.tokens), len(sequence.reading))
            self._outcomes.append((sequence.request.id, progress))

    def _follow(self, speculation: Speculation, work: Plan) -> None:
        """Let the draft model read what was computed of prompts."""
        busy = sum(slot.busy for slot in self._slots)
        for segment in work.segments[work.generating :]:
            speculation.follow(self._slots[segment.slot], busy)

    def _advance(self, slot: Slot, sequence: Sequence, segment: Segment, output: int, now: float) -> int:
        """Draw the tokens of a slot, as long as they are those of its draft, and see where that leads.

        `output` is the index of the segment's first row with an output. Returns how many tokens were drawn.
        """
        if sequence.request.max_tokens == 0:
            self._finish(slot, sequence, FinishReason.LENGTH, now)
            return 0
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
        self._seats.take_back(slot, length)
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
        self._seats.release(slot)

    def _fail(self, slot: Slot, error: SlotwireError) -> None:
        assert slot.sequence is not None
        self._outcomes.append((slot.sequence.request.id, error))
        self._seats.release(slot)


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
