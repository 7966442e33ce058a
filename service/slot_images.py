"""Slots as images: saving one, checking one that came, and putting it into a slot."""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from service.backend import Backend
from service.engine.types import ContextCheckpoint, FinishReason, Paused, SlotContents
from service.errors import Conflict, DataLoss, EngineFailure, SlotwireError
from service.identity import Identity
from service.state.fingerprint import Fingerprint, differences
from service.state.image import SlotImage, image_pieces, image_size
from service.state.integrity import digest_name, digest_of, is_digest
from service.state.layout import BLOB_MAGIC, BLOB_PREFIX, Section
from service.state.manifest import Manifest, decode
from service.state.memory import CacheKind, PayloadSummary
from service.state.parts import Blob, Role
from service.state.payload import parse_payload
from service.state.reader import ImageReader
from service.state.received import Completed
from service.state.sections import Bytes, Checkpoint, Draft
from service.state.tokens import TokenList

log = logging.getLogger("slotwire.state")

_PREFIX = struct.Struct("<Ii")
_DRAFT_STATE = Blob(Section.DRAFT, Role.DRAFT)


@dataclass(frozen=True, slots=True)
class SavedImage:
    """An image to send: `pieces` in their order, `size` bytes together."""

    manifest: bytes
    model: str
    fingerprint: Mapping[str, Any]
    tokens: int
    size: int
    pieces: tuple[Bytes, ...]
    resumable: bool


@dataclass(slots=True)
class Restored:
    """What became of an image. `dropped` are the sections that were not used, and why."""

    slot_id: int
    tokens: int
    applied: list[Section] = field(default_factory=list)
    dropped: dict[Section, str] = field(default_factory=dict)
    recomputed: bool = False
    resumable: bool = False
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Destination:
    """Where an image goes: a slot (None: an idle one), and what the slot is for from then on."""

    slot_id: int | None = None
    session: str | None = None
    cache_key: str = ""
    recompute: bool = False


EncodePaused = Callable[[Paused], Mapping[str, Any]]
DecodePaused = Callable[[Mapping[str, Any], tuple[int, ...], int | None], Paused]


class SlotImages:
    """Saves and restores the slots of a backend. For one event loop.

    `encode` and `decode` turn a paused generation into a JSON object and back; `decode` refuses what is not one.
    """

    def __init__(self, backend: Backend, identity: Identity, encode: EncodePaused, decode: DecodePaused) -> None:
        self._backend, self._identity = backend, identity
        self._encode, self._decode = encode, decode

    # saving

    async def save(self, slot_id: int, *, with_draft: bool = True) -> SavedImage:
        """The image of a slot, busy or not. Raises NotFound, EngineFailure, or Unavailable while loading."""
        self._backend.check_slot(slot_id)
        fingerprint = await self._identity.target()
        draft = await self._identity.draft() if with_draft else None
        contents = await self._backend.contents(slot_id, with_draft=with_draft)
        return await asyncio.to_thread(self._image, contents, fingerprint, draft)

    def _image(self, contents: SlotContents, fingerprint: Fingerprint, draft: Fingerprint | None) -> SavedImage:
        tokens = TokenList.of(contents.tokens)
        target = contents.target[BLOB_PREFIX:]
        section = Draft(contents.draft, b"") if contents.draft is not None else None
        digests = {Section.TARGET.value: digest_of([target])}
        extra: dict[str, Any] = {}
        if section is not None and draft is not None:
            digests[Section.DRAFT.value] = digest_of([section.state])
            extra = {"draft": {"fingerprint": draft.mapping(), "tokens": contents.draft_tokens}}
        paused = contents.paused
        manifest = Manifest(
            fingerprint=fingerprint.mapping(),
            model=self._backend.loaded.info.description,
            tokens=len(tokens),
            created=time.time(),
            pending_token=paused.generated[-1] if paused is not None else None,
            sampling=self._encode(paused) if paused is not None else None,
            digests=digests,
            extra=extra,
        )
        version = self._backend.loaded.state_version
        checkpoints = tuple(_checkpoint(checkpoint, version) for checkpoint in contents.checkpoints)
        image = SlotImage(version, tokens, target, checkpoints, draft=section, manifest=manifest)
        return SavedImage(
            manifest=manifest.encode(),
            model=manifest.model,
            fingerprint=manifest.fingerprint,
            tokens=len(tokens),
            size=image_size(image),
            pieces=tuple(image_pieces(image)),
            resumable=paused is not None,
        )

    # restoring

    def reader(self, *, any_kind: bool = False) -> ImageReader:
        """For an image that comes: what does not look like a state of this model is refused as it comes; with
        `any_kind` only what is no state at all, since tokens can be computed.
        """
        if any_kind:
            return ImageReader()
        samples = self._backend.loaded.samples
        return ImageReader(target=samples.target.kind, draft=samples.draft.kind if samples.draft else None)

    async def check_idle(self, slot_id: int) -> None:
        """Raise NotFound or Conflict where a slot cannot take an image now."""
        await self._backend.check_idle(slot_id)

    async def check_manifest(self, data: bytes, destination: Destination) -> None:
        """Refuse an image by its manifest, before any of it comes. Raises ManifestError or Conflict."""
        manifest = decode(data)
        limit = self._backend.loaded.info.slot_context
        await self._check_vocabulary(manifest)
        if manifest.tokens > limit:
            raise _too_long(manifest.tokens, limit)
        if not destination.recompute:
            await self._check_fingerprint(manifest)

    async def restore(self, completed: Completed, destination: Destination) -> Restored:
        """Put an image that came whole into a slot. Raises Conflict, Exhausted, NotFound, or what a prompt can."""
        began = time.monotonic()
        if destination.slot_id is not None:
            self._backend.check_slot(destination.slot_id)
        ids = completed.read.image.tokens.ids
        self._backend.loaded.runner.vocabulary.check("image.tokens", ids.tolist())
        if completed.read.image.manifest is not None:
            await self._check_vocabulary(completed.read.image.manifest)
        if len(ids) > self._backend.loaded.info.slot_context:
            raise _too_long(len(ids), self._backend.loaded.info.slot_context)
        restored = Restored(-1, len(ids), dropped=dict(completed.read.dropped))
        await asyncio.to_thread(_check_digests, completed)
        try:
            await self._check(completed)
            await self._put(completed, destination, restored)
        except Conflict as error:
            if not destination.recompute or error.reason not in _MISFITS:
                raise
            await self._recompute(tuple(ids.tolist()), destination, restored, error)
        restored.seconds = time.monotonic() - began
        return restored

    async def _check(self, completed: Completed) -> None:
        """Raises Conflict where the target state is not one of this model's context."""
        read = completed.read
        if read.image.manifest is not None:
            await self._check_fingerprint(read.image.manifest)
        if read.image.version > self._backend.loaded.state_version:
            raise _misfit(f"state version {read.image.version}; this server has {self._backend.loaded.state_version}")
        if len(read.image.tokens):
            problem = _problem(read.payload, self._backend.loaded.samples.target, len(read.image.tokens))
            if problem:
                raise _misfit(problem)

    async def _check_vocabulary(self, manifest: Manifest) -> None:
        """Tokens of another vocabulary are nonsense here, whether their state fits or is computed."""
        ours, theirs = await self._identity.target(), Fingerprint.of(manifest.fingerprint)
        if ours.vocabulary != theirs.vocabulary:
            raise Conflict("the tokens are of another vocabulary", reason="VOCABULARY_MISMATCH")

    async def _check_fingerprint(self, manifest: Manifest) -> None:
        theirs = Fingerprint.of(manifest.fingerprint)
        found = differences(await self._identity.target(), theirs)
        if found:
            fields = ", ".join(difference.field for difference in found)
            raise Conflict(
                "the state is of another model or context: " + "; ".join(map(str, found)),
                reason="FINGERPRINT_MISMATCH",
                fields=fields,
            )

    async def _put(self, completed: Completed, destination: Destination, restored: Restored) -> None:
        read = completed.read
        draft, draft_tokens = await self._draft_of(completed, restored)
        paused = self._paused_of(completed, restored)
        target = completed.prefixed_target
        _PREFIX.pack_into(target, 0, BLOB_MAGIC, 0)
        contents = SlotContents(
            tokens=tuple(read.image.tokens.ids.tolist()),
            target=target,
            draft=draft,
            draft_tokens=draft_tokens,
            session=destination.session,
            cache_key=destination.cache_key,
            paused=paused,
            checkpoints=self._checkpoints_of(completed, restored),
        )
        restored.slot_id, drafted = await self._backend.put(destination.slot_id, contents)
        restored.applied += [Section.TOKENS, Section.TARGET]
        restored.resumable = paused is not None
        if drafted:
            restored.applied.append(Section.DRAFT)
        elif draft is not None:
            restored.dropped[Section.DRAFT] = "the draft's context has no room for it"
        if read.image.manifest is not None:
            restored.applied.append(Section.MANIFEST)
        if contents.checkpoints:
            restored.applied.append(Section.CHECKPOINTS)

    async def _draft_of(self, completed: Completed, restored: Restored) -> tuple[memoryview | None, int]:
        """The draft model's state and the number of its tokens, where it fits the draft's context."""
        image, sample = completed.read.image, self._backend.loaded.samples.draft
        if image.draft is None or not len(image.draft.state):
            return None, 0
        payload = completed.read.payloads.get(_DRAFT_STATE)
        if sample is None:
            restored.dropped[Section.DRAFT] = "this server has no draft model"
        elif await self._is_of_another_draft(image.manifest):
            restored.dropped[Section.DRAFT] = "it is of another draft model or context"
        elif payload is None:
            restored.dropped[Section.DRAFT] = "it shares cells with the target"
        else:
            tokens = _tokens_of(payload)
            problem = _problem(payload, sample, tokens) if tokens <= len(image.tokens) else "it has more tokens"
            if problem is None:
                return memoryview(image.draft.state), tokens
            restored.dropped[Section.DRAFT] = problem
        return None, 0

    async def _is_of_another_draft(self, manifest: Manifest | None) -> bool:
        """By what the manifest says of the draft, if it says anything."""
        said = manifest.extra.get("draft") if manifest is not None else None
        ours, theirs = await self._identity.draft(), said.get("fingerprint") if isinstance(said, dict) else None
        return ours is not None and isinstance(theirs, dict) and theirs != ours.mapping()

    def _checkpoints_of(self, completed: Completed, restored: Restored) -> tuple[ContextCheckpoint, ...]:
        """The context checkpoints, if all of them fit. The draft's part of them is not used."""
        image, sample = completed.read.image, self._backend.loaded.samples.target
        shape = tuple(cache.shape for cache in sample.caches[1:] or sample.caches)
        found = []
        for index, checkpoint in enumerate(image.checkpoints):
            payload = completed.read.payloads.get(Blob(Section.CHECKPOINTS, Role.TARGET, index))
            last = checkpoint.tokens - 1
            if payload is None or payload.shape != shape or {cache.last_position for cache in payload.caches} != {last}:
                restored.dropped[Section.CHECKPOINTS] = f"checkpoint {index} does not fit this model's memory"
                return ()
            found.append(ContextCheckpoint(checkpoint.tokens, memoryview(bytes(checkpoint.target))))
        return tuple(found)

    def _paused_of(self, completed: Completed, restored: Restored) -> Paused | None:
        manifest = completed.read.image.manifest
        if manifest is None or manifest.sampling is None:
            return None
        try:
            tokens = tuple(completed.read.image.tokens.ids.tolist())
            return self._decode(manifest.sampling, tokens, manifest.pending_token)
        except SlotwireError as error:
            log.info("a generation cannot be resumed: %s", error)
            restored.dropped[Section.MANIFEST] = f"its generation cannot go on: {error.message}"
            return None

    async def _recompute(
        self, tokens: tuple[int, ...], destination: Destination, restored: Restored, error: Conflict
    ) -> None:
        if not tokens:
            raise error
        slot_id, reason = await self._backend.prefill(
            tokens, slot_id=destination.slot_id, session=destination.session, cache_key=destination.cache_key
        )
        if reason is not FinishReason.LENGTH:
            raise EngineFailure(f"the tokens could not be computed: {reason.value}", reason="RECOMPUTE_FAILED")
        restored.slot_id, restored.recomputed = slot_id, True
        restored.applied.append(Section.TOKENS)
        restored.dropped[Section.TARGET] = error.message


_MISFITS = frozenset({"FINGERPRINT_MISMATCH", "STATE_MISFIT", "STATE_UNUSABLE"})


def _check_digests(completed: Completed) -> None:
    """Raises DataLoss where a state is not the one that was saved: what a file went through, no upload can tell."""
    image = completed.read.image
    states = {Section.TARGET: image.target, Section.DRAFT: image.draft.state if image.draft is not None else None}
    for section, state in states.items():
        expected = image.manifest.digests.get(section.value) if image.manifest is not None else None
        if state is None or expected is None or not is_digest(expected):
            continue
        if digest_of([state], digest_name(expected)) != expected.lower():
            raise DataLoss(f"the {section.value} state is not the one that was saved", reason="DIGEST_MISMATCH")


def _checkpoint(checkpoint: ContextCheckpoint, version: int) -> Checkpoint:
    payload = parse_payload(checkpoint.data[BLOB_PREFIX:], version=version, partial=True)
    first = min(cache.first_position or 0 for cache in payload.caches)
    return Checkpoint(checkpoint.length, first, checkpoint.length - 1, checkpoint.data, b"", b"")


def _misfit(problem: str) -> Conflict:
    return Conflict(f"the state does not fit this model's memory: {problem}", reason="STATE_MISFIT")


def _too_long(tokens: int, limit: int) -> Conflict:
    return Conflict(
        f"the state has {tokens} tokens; a slot holds {limit}", reason="STATE_TOO_LONG", tokens=tokens, limit=limit
    )


def _tokens_of(payload: PayloadSummary) -> int:
    last = payload.caches[0].last_position
    return 0 if last is None else last + 1


def _problem(payload: PayloadSummary, sample: PayloadSummary, tokens: int) -> str | None:
    """Why a payload cannot be the state of the first `tokens` positions in the context that wrote `sample`."""
    if payload.shape != sample.shape:
        return f"it has {_shown(payload)}; this context has {_shown(sample)}"
    for cache in payload.caches:
        if cache.last_position != tokens - 1:
            return f"its last position is {cache.last_position}, not {tokens - 1}"
    first = payload.caches[0]
    if first.kind is CacheKind.ATTENTION and (first.first_position, first.cells) != (0, tokens):
        return f"{first.cells} cells from position {first.first_position} on, not {tokens} from 0"
    return None


def _shown(payload: PayloadSummary) -> str:
    def of(cache: Any) -> str:
        types = "/".join(dict.fromkeys(tensor.type for tensor in cache.tensors))
        rows = sorted({tensor.row_bytes for tensor in cache.tensors})
        return f"{cache.kind.value} ({cache.layers} layers of {types}, {', '.join(map(str, rows))} bytes a cell)"

    return " and ".join(map(of, payload.caches)) or "nothing"
