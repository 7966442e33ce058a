"""The slots and the memory behind them: what is kept, dropped, evicted, taken out and put back."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace

from service.engine.batch import Decoder, DecodeStatus, Runner, Segment
from service.engine.scheduler import TAIL
from service.engine.sequence import Sequence
from service.engine.shelf import Shelf
from service.engine.slots import Slot
from service.engine.speculation import Speculation
from service.engine.types import Paused, SlotContents
from service.errors import Conflict, EngineFailure, Exhausted, SlotwireError

log = logging.getLogger("slotwire.engine")

_SPACING = 1024  # tokens between context checkpoints in the middle of a prompt
Rooms = tuple[memoryview | None, memoryview | None]
"""Buffers for the states of the target and of the draft model."""

RETRY_AFTER = 1.0  # seconds; slots turn over faster than anyone could predict from here


class Seats:
    """Keeps what is known of each slot in step with the memory of the runner and of the draft model."""

    def __init__(self, runner: Runner, speculation: Speculation | None, shelf: Shelf) -> None:
        self._runner, self._speculation, self._info = runner, speculation, runner.info
        self._shelf = shelf
        self.fetched = 0
        """Tokens that came back from the shelf."""
        self.slots = [Slot(index) for index in range(self._info.slots)]
        self._uses = 0

    def busy(self) -> Iterator[tuple[Slot, Sequence]]:
        """The slots with a sequence."""
        for slot in self.slots:
            if slot.sequence is not None:
                yield slot, slot.sequence

    def generating(self) -> list[Slot]:
        """The slots whose sequence has a newest token."""
        return [slot for slot, sequence in self.busy() if sequence.pending is not None]

    # sequences come and go

    def fits(self, sequence: Sequence) -> bool:
        """Whether what it reads has room beside the busy slots; if not, it waits rather than being cut off later."""
        if self._info.capabilities.recurrent:  # a state of constant size for each slot
            return True
        busy = sum(max(slot.length, len(other.reading)) + 1 for slot, other in self.busy())
        return busy + len(sequence.reading) < self._info.context or not busy

    def seat(self, slot: Slot, sequence: Sequence, now: float) -> int:
        """Give a slot to a sequence; returns how many tokens it finds there."""
        request = sequence.request
        self._fetch(slot, sequence)
        slot.replay.clear()  # where it is a part of the prompt, it is computed as one
        slot.paused = None
        reused = slot.common_prefix(sequence)
        slot.marked = 0
        if 2 * reused < len(slot.tokens):  # another conversation; one that was edited is not worth a copy
            self._shelve(slot)
        if reused < len(slot.tokens):
            reused = self._runner.keep(slot.id, reused)
            del slot.tokens[reused:]
        self._touch(slot)
        slot.session, slot.cache_key, slot.sequence = request.session, request.cache_key, sequence
        sequence.start(reused, now)
        if self._speculation is not None:
            self._speculation.open(slot, sequence)
        return reused

    def release(self, slot: Slot) -> None:
        """The sequence of a slot is over; what was computed for it stays."""
        assert slot.sequence is not None
        slot.sequence.sampler.close()
        slot.last_sequence, slot.sequence = slot.sequence, None
        slot.last_used = time.time()
        if self._speculation is not None:
            self._speculation.close(slot)

    # tokens come and go

    def add(self, segment: Segment) -> int:
        """A segment was computed; returns how many of its tokens were computed again."""
        slot = self.slots[segment.slot]
        replayed = min(len(slot.replay), len(segment.tokens))
        del slot.replay[:replayed]
        slot.tokens.extend(segment.tokens)
        if slot.sequence is not None and slot.sequence.pending is None:
            self._mark(slot, len(slot.sequence.reading))
        return replayed

    def _mark(self, slot: Slot, end: int) -> None:
        """Take a context checkpoint while a prompt of `end` tokens is read: now and then, and near its end."""
        length = len(slot.tokens)
        due = length == end - TAIL or (length < end and length - slot.marked >= _SPACING)
        if due and self._runner.add_context_checkpoint(slot.id):
            slot.marked = length

    def take_back(self, slot: Slot, length: int) -> None:
        """Only the first `length` tokens of a slot are its text. Where the memory goes back further, the rest of them
        is computed again.
        """
        if length < len(slot.tokens):
            kept = self._runner.keep(slot.id, length)
            slot.replay = slot.tokens[kept:length]
            del slot.tokens[kept:]

    def clear(self, slot: Slot) -> None:
        """Empty a slot."""
        self._runner.keep(slot.id, 0)  # also where no tokens are known: a failed decode may have left some
        slot.tokens.clear()
        slot.replay.clear()
        slot.paused = None
        if self._speculation is not None:
            self._speculation.forget(slot)

    def evict(self, spared: Slot | None = None) -> bool:
        """Empty the idle slot that was used longest ago; returns False where there is none."""
        idle = [slot for slot in self.slots if slot.length and not slot.busy and slot is not spared]
        if not idle:
            return False
        slot = min(idle, key=lambda slot: slot.used)
        log.info("evict slot %d: %d tokens, the cache is full", slot.id, len(slot.tokens))
        self._shelve(slot)
        self.clear(slot)
        return True

    def erase(self, slot_id: int) -> int:
        """Empty an idle slot; returns how many tokens it held. Raises Conflict where it is busy."""
        slot = self._idle(slot_id)
        count = slot.length
        self.clear(slot)
        slot.session, slot.cache_key = None, ""
        return count

    # states

    def samples(self) -> tuple[memoryview, memoryview | None]:
        """States of two tokens, of the target and of the draft model, that show how theirs are made up. To be called
        before the first request. Raises EngineFailure.
        """
        draft = self._runner.draft
        return _sample(self._runner), _sample(draft) if draft is not None else None

    def spare(self, session: str | None) -> int:
        """An idle slot for a state: the session's, else an empty one, else the one used longest ago. Raises Conflict
        where all are busy.
        """
        idle = [slot for slot in self.slots if not slot.busy]
        if not idle:
            raise Conflict("all slots are busy", reason="SLOT_BUSY")
        return min(idle, key=lambda s: (session is None or s.session != session, s.length > 0, s.used)).id

    def state_sizes(self, slot_id: int) -> tuple[int, int]:
        """Bytes of a slot's states, of the target and of the draft model."""
        slot = self.slots[slot_id]
        draft = self._speculation.state_size(slot) if self._speculation is not None else 0
        return self._runner.state_size(slot_id), draft

    def contents(self, slot_id: int, *, with_draft: bool, rooms: Rooms = (None, None)) -> SlotContents:
        """What a slot holds, busy or not; the states in `rooms`, where these are large enough. Raises EngineFailure."""
        slot = self.slots[slot_id]
        self._complete(slot)
        draft = self._speculation.state(slot, rooms[1]) if with_draft and self._speculation is not None else None
        held, state = draft if draft is not None and draft[0] <= len(slot.tokens) else (0, None)
        return SlotContents(
            tokens=tuple(slot.tokens),
            target=self._runner.state(slot.id, rooms[0]),
            draft=state,
            draft_tokens=held,
            session=slot.session,
            cache_key=slot.cache_key,
            paused=_paused(slot),
            checkpoints=self._runner.context_checkpoints(slot.id),
        )

    def put(self, slot_id: int, contents: SlotContents) -> bool:
        """Replace what an idle slot holds. Returns whether the draft model's state was taken over, too.

        Raises Conflict (slot busy, too many tokens, another kind of state) or Exhausted (no room); after the latter two
        the slot is empty.
        """
        slot, count = self._idle(slot_id), len(contents.tokens)
        if count > self._info.slot_context:
            raise Conflict(
                f"the state has {count} tokens; a slot holds {self._info.slot_context}",
                reason="STATE_TOO_LONG",
                tokens=count,
                limit=self._info.slot_context,
            )
        self.clear(slot)
        slot.session, slot.cache_key = contents.session, contents.cache_key
        self._touch(slot)
        if not count:
            return False
        self._make_room(slot, count)
        if not self._runner.put_back(slot.id, contents.target, count):
            raise Conflict("the state does not fit the memory of this model", reason="STATE_UNUSABLE")
        slot.tokens, slot.paused = list(contents.tokens), contents.paused
        self._runner.put_context_checkpoints(slot.id, contents.checkpoints)
        if contents.draft is None or self._speculation is None:
            return False
        return self._speculation.put_back(slot, contents.draft_tokens, contents.draft)

    def paused(self, slot_id: int) -> Paused:
        """The generation that was restored with a slot. Raises Conflict where there is none, or the slot is busy."""
        slot = self._idle(slot_id)
        if slot.paused is None:
            raise Conflict(f"slot {slot_id} has no generation that could go on", reason="NOTHING_TO_RESUME")
        request = replace(slot.paused.request, session=slot.session, cache_key=slot.cache_key)
        return replace(slot.paused, request=request)

    def _shelve(self, slot: Slot) -> None:
        """Copy what a slot holds to the shelf, where that is worth it."""
        if self._shelf.wants(len(slot.tokens), self._runner.state_size(slot.id) if slot.tokens else 0):
            self._shelf.keep(self.contents(slot.id, with_draft=True))

    def _fetch(self, slot: Slot, sequence: Sequence) -> None:
        """Bring what a sequence can go on from back from the shelf, if that is more than its slot has."""
        usable = slot.common_prefix(sequence)
        if usable < len(slot.tokens) and not self._info.capabilities.trim:
            usable = 0
        contents = self._shelf.take(sequence, better_than=usable)
        if contents is None:
            return
        self._shelve(slot)
        try:
            self.put(slot.id, contents)
            self.fetched += len(contents.tokens)
        except SlotwireError as error:
            log.info("slot %d: %d tokens stay away: %s", slot.id, len(contents.tokens), error)

    def _idle(self, slot_id: int) -> Slot:
        slot = self.slots[slot_id]
        if slot.busy:
            raise Conflict(f"slot {slot_id} is busy", reason="SLOT_BUSY", slot=slot_id)
        return slot

    def _touch(self, slot: Slot) -> None:
        self._uses += 1
        slot.used, slot.last_used = self._uses, time.time()

    def _make_room(self, slot: Slot, count: int) -> None:
        """Evict idle slots until a state of `count` tokens has room."""
        while not self._info.capabilities.recurrent and sum(s.length for s in self.slots) + count > self._info.context:
            if not self.evict(spared=slot):
                raise Exhausted(
                    f"the context of {self._info.context} tokens has no room for {count} beside the busy slots",
                    retry_after=RETRY_AFTER,
                    reason="CACHE_FULL",
                    context_tokens=self._info.context,
                )

    def _complete(self, slot: Slot) -> None:
        """Compute what waits to be computed again, so that the state has it, too."""
        while slot.replay:
            segment = Segment(slot.id, slot.replay[: self._runner.max_rows], len(slot.tokens))
            status = self._runner.decode([segment])
            if status is not DecodeStatus.OK:
                log.warning("slot %d: %d tokens are not in its state: %s", slot.id, len(slot.replay), status.value)
                return
            self.add(segment)


def _sample(decoder: Decoder) -> memoryview:
    if decoder.decode([Segment(0, [0, 0], 0)]) is not DecodeStatus.OK:
        raise EngineFailure("a sample state could not be made", reason="STATE_FAILED")
    state = decoder.state(0)
    decoder.keep(0, 0)
    return state


def _paused(slot: Slot) -> Paused | None:
    """The generation of a slot, where it could go on elsewhere."""
    sequence = slot.sequence
    if sequence is None:
        return slot.paused
    sampling = sequence.request.sampling
    if sequence.pending is None or slot.replay or sampling.mirostat is not None or sampling.xtc.probability > 0:
        return None  # nothing drawn yet; or what the sampler knows cannot be told
    return Paused(sequence.request, tuple(sequence.tokens), sequence.sampler.draws)
