"""Speculation: who drafts how many tokens in a step, and what is learned from the verdict.

Two sources of drafts: the slot's own text (n-grams), which is free, and a draft model. Where both could draft, n-grams
do, unless they are accepted much less.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from service.engine.acceptance import Acceptance, Track
from service.engine.batch import Decoder, DecodeStatus, Segment
from service.engine.draft_model import DraftModel, Wish
from service.engine.ngram import NgramIndex, Shadow
from service.engine.rowcost import RowCost
from service.engine.sequence import Sequence
from service.engine.settings import SpeculationSettings
from service.engine.slots import Slot
from service.engine.tempo import Candidate, Tempo
from service.engine.types import DraftOptions, ModelInfo, Rollback

REPLAY_LIMIT = 32
"""Tokens that may wait to be computed again; then a step without a draft computes them."""

_PRIOR_MEMORY = 256  # trials of all slots together
_PREFERENCE = 0.1  # a draft model has to be accepted that much more often than n-grams to be asked first
_CATCH_UP = 64  # rows of a step in which the draft model reads what it has missed
_CALIBRATED = (1, 2, 3, 4, 6, 8, 12, 16)  # rows
_ATTEMPTS = 4
_REST = 8  # steps without a look at drafts, after a draft model was found not to pay
_OVERHEAD_WEIGHT = 0.1  # of the newest measurement


@dataclass(slots=True)
class _Text:
    """The text of one request, and how drafts for it fare."""

    options: DraftOptions
    tokens: list[int]
    index: NgramIndex | None
    ngrams: Track
    model: Track
    shadow: Shadow = field(default_factory=Shadow)
    drafting: Track | None = None
    """Whose draft is being verified."""
    match_length: int = 0
    """Of the draft that is being verified, where it comes from n-grams."""


@dataclass(slots=True)
class _Offer:
    """What a slot could draft; `proposal` is there for n-grams alone."""

    slot: Slot
    text: _Text
    candidate: Candidate
    proposal: list[int]
    match_length: int


class Speculation:
    """Drafts for the slots of one engine. Not thread-safe.

    `target` is the model that decides; `draft` computes the draft model, where there is one.
    """

    def __init__(
        self,
        settings: SpeculationSettings,
        target: ModelInfo,
        draft: Decoder | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._slot_context, self._clock = settings, target.slot_context, clock
        self._replays = target.capabilities.rollback is Rollback.CHECKPOINT
        self.tempo = Tempo()
        self._draft = draft
        self._model = DraftModel(draft, target.slots, self.tempo.draft, clock) if draft is not None else None
        self._ngram_prior, self._model_prior = Acceptance(memory=_PRIOR_MEMORY), Acceptance(memory=_PRIOR_MEMORY)
        self._texts: dict[int, _Text] = {}
        self._overhead = 0.0
        self._rest, self._resting = 0, 0
        """Steps that are left without a look at drafts, and the number of slots for which that was decided."""

    def calibrate(self, target: Decoder) -> None:
        """Measure what decodes cost by their rows, in slot 0, while all slots are empty."""
        for decoder, cost in ((target, self.tempo.target), (self._draft, self.tempo.draft)):
            if decoder is not None:
                most = min(self._settings.draft_max + 1, decoder.max_rows, decoder.max_outputs)
                for rows in (count for count in _CALIBRATED if count <= most):
                    self._time(decoder, cost, rows)

    def _time(self, decoder: Decoder, cost: RowCost, rows: int) -> None:
        """The fastest of some decodes tells: the first one allocates memory, and any may be disturbed."""
        seconds = []
        for _ in range(_ATTEMPTS):
            began = self._clock()
            if decoder.decode([Segment(0, [0] * rows, 0, outputs=rows)]) is DecodeStatus.OK:
                seconds.append(self._clock() - began)
            decoder.keep(0, 0)
        for _ in seconds[1:]:
            cost.observe(rows, min(seconds))

    # the life of a text

    def open(self, slot: Slot, sequence: Sequence) -> None:
        """A sequence got a slot."""
        text = [*sequence.request.tokens, *sequence.tokens]
        if self._model is not None:
            self._model.open(slot.id, text)
        if sequence.request.draft.n_max == 0:
            return
        index = NgramIndex() if self._settings.ngram else None
        if index is not None:
            index.extend(text)
        self._texts[slot.id] = _Text(
            sequence.request.draft, text, index, Track(self._ngram_prior), Track(self._model_prior)
        )

    def close(self, slot: Slot) -> None:
        """The request of a slot is over; the draft's memory stays for the next one."""
        self._texts.pop(slot.id, None)

    def forget(self, slot: Slot) -> None:
        """The slot was emptied."""
        if self._model is not None:
            self._model.forget(slot.id)

    def state_size(self, slot: Slot) -> int:
        """Bytes of the draft model's state."""
        return self._model.state_size(slot.id) if self._model is not None else 0

    def state(self, slot: Slot, room: memoryview | None) -> tuple[int, memoryview] | None:
        """What the draft model holds of a slot's text: a number of tokens, and their state."""
        return self._model.state(slot.id, room) if self._model is not None else None

    def put_back(self, slot: Slot, length: int, state: memoryview) -> bool:
        """Take over the draft model's state of the first `length` tokens of a slot; False where it does not fit."""
        return self._model is not None and self._model.put_back(slot.id, slot.tokens[:length], state)

    def follow(self, slot: Slot, busy: int) -> None:
        """The target has read a part of its prompt; let the draft model read it too, if it is likely to be asked beside
        all the `busy` slots.
        """
        if self._model is None or slot.id not in self._texts or not self._would_ask(busy):
            return
        text = self._texts[slot.id].tokens
        if self._model.has_room(slot.id, len(text) + self._settings.draft_max):
            missing = len(slot.tokens) - (len(text) - self._model.backlog(slot.id, len(text)))
            self._model.catch_up(slot.id, text, missing)

    # a step

    def draft(self, generating: Tokens[Slot], prompt_rows: int, room: int) -> dict[int, list[int]]:
        """A draft for each slot for which one is expected to pay, in a step with `prompt_rows` rows of prompts and
        `room` rows for drafts.
        """
        if self._rest and self._resting == len(generating):
            self._rest -= 1
            return {}
        offers = [offer for slot in generating if (offer := self._offer(slot)) is not None]
        if not offers:
            return {}
        counts = self.tempo.choose(
            [offer.candidate for offer in offers], len(generating) - len(offers), prompt_rows, room
        )
        drafts: dict[int, list[int]] = {}
        asked: list[tuple[_Offer, int]] = []
        for offer, count in zip(offers, counts, strict=True):
            n = count if count >= offer.text.options.n_min else 0
            if offer.candidate.model:
                asked += [(offer, n)] if n else []
            elif n:
                drafts[offer.slot.id] = offer.proposal[:n]
                offer.text.drafting, offer.text.match_length = offer.text.ngrams, offer.match_length
            elif offer.text.shadow.idle:
                offer.text.shadow.watch(offer.proposal, offer.match_length)
        if not any(counts) and not self._settings.ngram:
            self._rest, self._resting = _REST, len(generating)
        return drafts | self._ask_model(asked)

    def cancel(self) -> None:
        """The drafts of this step are not verified, for want of room."""
        for text in self._texts.values():
            text.drafting = None

    def settle(self, slot: Slot, drawn: Tokens[int], drafted: int, accepted: int) -> None:
        """The text of a slot went on with `drawn`; of `drafted` tokens the first `accepted` agreed with it."""
        text = self._texts.get(slot.id)
        if text is None:
            return
        if self._model is not None:
            self._model.settle(slot.id, len(text.tokens) + min(accepted, len(drawn)))
        text.tokens.extend(drawn)
        for track in (text.ngrams, text.model):
            if track is text.drafting:
                track.record(len(drawn), drafted, accepted, text.match_length)
            else:
                track.record(len(drawn), 0, 0)
        if text.index is not None:
            text.index.extend(drawn)
            decided = text.shadow.advance(drawn)
            if decided is not None:
                text.ngrams.watched(*decided, text.shadow.match_length)
        text.drafting, text.match_length = None, 0

    def observe_overhead(self, seconds: float) -> None:
        """A round's checkpoint and its way back took this long."""
        self._overhead += _OVERHEAD_WEIGHT * (seconds - self._overhead)

    # choices

    def _offer(self, slot: Slot) -> _Offer | None:
        """What a slot could draft; None where it cannot draft at all."""
        text, limit = self._texts.get(slot.id), self._limit(slot)
        if text is None or limit < max(1, text.options.n_min) or len(slot.replay) >= REPLAY_LIMIT:
            return None
        proposal = text.index.propose(limit) if text.index is not None else []
        match = text.index.match_length if text.index is not None and proposal else 0
        model = self._model
        if model is not None and not model.has_room(slot.id, len(text.tokens) + limit):
            model = None
        if proposal and (model is None or text.ngrams.probability(match) + _PREFERENCE >= text.model.probability()):
            candidate = Candidate(text.ngrams, len(proposal), text.ngrams.probability(match))
        elif model is not None:
            backlog = model.backlog(slot.id, len(text.tokens))
            candidate = Candidate(text.model, limit, text.model.probability(), model=True, backlog=backlog)
        else:
            return None
        candidate.overhead = self._overhead + (self._replay_cost(candidate) if self._replays else 0.0)
        return _Offer(slot, text, candidate, proposal, match)

    def _replay_cost(self, candidate: Candidate) -> float:
        """Expected seconds of the rows that come again after a rejection."""
        p, n = candidate.probability, candidate.limit
        kept = n if p >= 1 else (1 - p**n) / (1 - p)  # the newest token and the accepted ones
        return float((1 - p**n) * kept * self.tempo.target.least_slope(1))

    def _would_ask(self, busy: int) -> bool:
        """Whether the draft model would be worth its time if all busy slots were generating."""
        track, limit = Track(self._model_prior), self._settings.draft_max
        company = [Candidate(track, limit, track.probability(), model=True) for _ in range(busy)]
        return any(self.tempo.choose(company))

    def _limit(self, slot: Slot) -> int:
        """The most tokens that a draft may have: more could not become text."""
        sequence = slot.sequence
        assert sequence is not None
        request = sequence.request
        limit = self._settings.draft_max
        if request.draft.n_max is not None:
            limit = min(limit, request.draft.n_max)
        if request.max_tokens is not None:
            limit = min(limit, request.max_tokens - sequence.generated - 1)
        return min(limit, self._slot_context - slot.length - 1)

    def _ask_model(self, asked: list[tuple[_Offer, int]]) -> dict[int, list[int]]:
        """Drafts of the draft model. One that has much to read first reads a part of it instead."""
        if self._model is None or not asked:
            return {}
        began = self._clock()
        wishes, offers = [], []
        for offer, n in asked:
            slot, text = offer.slot.id, offer.text
            if self._model.backlog(slot, len(text.tokens)) > _CATCH_UP:
                self._model.catch_up(slot, text.tokens, _CATCH_UP)
            else:
                wishes.append(Wish(slot, text.tokens, n, text.options.p_min))
                offers.append(offer)
        drafts: dict[int, list[int]] = {}
        for offer, draft in zip(offers, self._model.propose(wishes), strict=True):
            if draft and len(draft) >= offer.text.options.n_min:
                drafts[offer.slot.id] = draft
                offer.text.drafting = offer.text.model
        share = (self._clock() - began) / len(asked)
        for offer, _ in asked:
            assert offer.slot.sequence is not None
            offer.slot.sequence.tally.draft_seconds += share
        return drafts
