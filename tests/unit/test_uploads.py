"""Uploads: real images in any chunks, streams that break off, callers that lie, and what all of that costs."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import re
import struct
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from service.errors import Conflict, DataLoss, Exhausted, InvalidRequest, NotFound, OutOfRange, SlotwireError
from service.state.errors import ImageError, PayloadError
from service.state.image import ImageRead, read_image, section_pieces
from service.state.integrity import BLAKE3, SHA256, chunk_of, chunks, digest_of
from service.state.layout import BLOB_PREFIX, SECTION_MAGICS, Section
from service.state.memory import MemoryKind
from service.state.reader import ImageReader
from service.state.received import Completed
from service.state.upload import Upload
from service.state.uploads import Uploads, UploadUsage
from tests.unit.images import GOLDEN, PREFIX, full_image, payload, small_image, written

IMAGE = written(full_image())
NOTHING = UploadUsage(0, 0, 0)


class Clock:
    """Stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def uploads(**changes: Any) -> Uploads:
    limits = {"max_uploads": 4, "max_bytes": 1 << 20, "time_to_live": 60.0, "clock": Clock()}
    return Uploads(**(limits | changes))


def sent(data: bytes, size: int = 1000, all_uploads: Uploads | None = None) -> Completed:
    """What comes of an image that is sent in chunks of a size."""
    all_uploads = all_uploads or uploads()
    with all_uploads.begin(None, len(data)).attached() as upload:
        for chunk in chunks([data], size):
            assert upload.take(chunk) == chunk.offset + len(chunk.data)
        return upload.finish(digest_of([data]))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry(clock: Clock) -> Uploads:
    return uploads(clock=clock)


@pytest.fixture
def upload(registry: Uploads) -> Iterator[Upload]:
    """Of IMAGE, attached, with 100 bytes committed."""
    with registry.begin("one", len(IMAGE)).attached() as upload:
        upload.take(chunk_of(IMAGE[:100], 0))
        yield upload


# What arrives


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
@pytest.mark.parametrize("size", [777, 1 << 20])
def test_a_file_of_a_real_server_arrives_as_it_is(path: Path, size: int) -> None:
    data = path.read_bytes()
    completed = sent(data, size)
    assert completed.buffer == data
    assert completed.read == read_image(data)
    assert completed.digest == digest_of([data])
    assert completed.prefixed_target[BLOB_PREFIX:] == completed.read.image.target


@pytest.mark.parametrize("kind", MemoryKind)
@pytest.mark.parametrize("version", [2, 3, 4])
def test_an_image_of_every_kind_arrives_with_all_its_sections(kind: MemoryKind, version: int) -> None:
    image = full_image(kind, version=version)
    completed = sent(written(image), 64)
    assert completed.read.image == image
    assert completed.read == read_image(written(image))


@given(st.lists(st.integers(1, len(IMAGE) - 1), max_size=8, unique=True))
def test_how_an_image_is_cut_does_not_matter(places: list[int]) -> None:
    all_uploads = uploads()
    with all_uploads.begin(None, len(IMAGE)).attached() as upload:
        for start, end in itertools.pairwise([0, *sorted(places), len(IMAGE)]):
            upload.take(chunk_of(IMAGE[start:end], start))
        completed = upload.finish(digest_of([IMAGE]))
    assert completed.read == read_image(IMAGE)
    assert all_uploads.usage == NOTHING


BODIES = {
    Section.CHECKPOINTS: struct.pack("<IQiiQ", 1, 1, 0, 0, 24) + PREFIX + bytes(16) + bytes(16),
    Section.DRAFT: struct.pack("<Q", 8) + bytes(8) + struct.pack("<Q", 3) + b"abc",
    Section.MANIFEST: struct.pack("<Q", 2) + b"{}",
}
DAMAGED = {
    section: struct.pack("<II", magic, 1) + BODIES[section] for section, magic in SECTION_MAGICS.items()
}  # fmt: skip
"""Sections that can be read to their ends, and say nonsense."""
SOUND = written(dataclasses.replace(full_image(), checkpoints=(), draft=None, manifest=None))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damage_behind_the_target_state_drops_the_same_as_in_a_file(draw: st.DataObject) -> None:
    data = bytearray(IMAGE)
    for _ in range(draw.draw(st.integers(1, 3))):
        data[draw.draw(st.integers(len(SOUND), len(data) - 1))] = draw.draw(st.integers(0, 255))
    cut = bytes(data[: draw.draw(st.integers(len(SOUND), len(data)))])
    size = draw.draw(st.integers(1, 2000))
    try:
        read_in_pieces(cut, size)
    except ImageError as error:
        with pytest.raises(ImageError, match=re.escape(error.message)):
            sent(cut, size)
    else:
        assert_as_in_a_file(cut, size)


@pytest.mark.parametrize("sound", SECTION_MAGICS, ids=lambda section: section.value)
def test_damaged_sections_do_not_move_a_sound_one_behind_them(sound: Section) -> None:
    last = b"".join(section_pieces(full_image(), sound))
    others = [section for section in SECTION_MAGICS if section is not sound]
    for order in ([], others[:1], others[1:], others, others[::-1]):
        completed = assert_as_in_a_file(SOUND + b"".join(map(DAMAGED.__getitem__, order)) + last, 50)
        assert list(completed.read.dropped) == order
        image = completed.read.image
        assert (sound is Section.DRAFT) == (image.draft == full_image().draft)
        assert (sound is Section.CHECKPOINTS) == (image.checkpoints == full_image().checkpoints)


@pytest.mark.parametrize("order", list(itertools.permutations(SECTION_MAGICS)), ids=lambda order: order[0].value)
def test_sections_may_come_in_any_order(order: tuple[Section, ...]) -> None:
    data = SOUND + b"".join(itertools.chain.from_iterable(section_pieces(full_image(), section) for section in order))
    assert assert_as_in_a_file(data, 50).read.image == full_image()


def test_a_second_section_of_a_kind_takes_nothing_from_the_first() -> None:
    completed = assert_as_in_a_file(IMAGE + b"".join(section_pieces(full_image(), Section.DRAFT)), 50)
    assert completed.read.image == full_image()
    assert list(completed.read.dropped) == [Section.DRAFT]


def assert_as_in_a_file(data: bytes, size: int) -> Completed:
    completed = sent(data, size)
    assert completed.read == read_in_pieces(data, size)
    return completed


def read_in_pieces(data: bytes, size: int) -> ImageRead:
    return read_image(data[start : start + size] for start in range(0, len(data), size))


def test_the_state_is_not_copied() -> None:
    completed = sent(IMAGE)
    image = completed.read.image
    assert image.draft is not None
    blobs = [image.target, image.draft.state, image.draft.speculative]
    blobs += [blob for point in image.checkpoints for blob in (point.target, point.draft, point.speculative)]
    for blob in blobs:
        assert isinstance(blob, memoryview)
        assert blob.obj is completed.buffer.obj
        assert blob.readonly
    before = [bytes(blob) for blob in blobs]
    completed.buffer[:] = bytes(len(IMAGE))
    assert any(map(any, before))
    assert not any(map(any, blobs))


def test_the_prefix_of_the_target_state_can_be_written_in_its_place() -> None:
    image = full_image()
    completed = sent(written(image))
    completed.prefixed_target[:BLOB_PREFIX] = PREFIX
    assert completed.prefixed_target == PREFIX + bytes(image.target)
    assert completed.read.image == image  # also its tokens, the end of which was there


def test_a_shortest_image_has_room_for_the_prefix() -> None:
    image = dataclasses.replace(small_image(), tokens=dataclasses.replace(small_image().tokens, data=b"", packed=False))
    image = dataclasses.replace(image, checkpoints=())
    completed = sent(written(image))
    assert completed.target_offset == 12
    assert len(completed.prefixed_target) == BLOB_PREFIX + len(image.target)


def test_bytes_of_someone_newer_behind_the_sections_arrive_too() -> None:
    completed = sent(IMAGE + b"NEW!" + bytes(1000))
    assert completed.read.unknown == b"NEW!"
    assert completed.read.image == full_image()
    assert len(completed.buffer) == len(IMAGE) + 1004


def test_a_reader_is_made_for_each_upload_and_knows_what_it_is_for() -> None:
    all_uploads = uploads(reader=lambda: ImageReader(target=MemoryKind.ATTENTION))
    sent(written(full_image(MemoryKind.ATTENTION)), 100, all_uploads)
    with pytest.raises(PayloadError):
        sent(written(full_image(MemoryKind.RECURRENT)), 100, all_uploads)
    sent(written(full_image(MemoryKind.ATTENTION)), 100, all_uploads)


# Going on


@pytest.mark.parametrize("algorithm", [BLAKE3, SHA256])
def test_a_broken_stream_goes_on_where_it_ended(registry: Uploads, algorithm: str) -> None:
    def stream() -> None:
        with registry.begin("mine", len(IMAGE), algorithm).attached() as upload:
            for chunk in itertools.islice(chunks([IMAGE], 100), 3):
                upload.take(chunk)
            raise ConnectionError

    with pytest.raises(ConnectionError):
        stream()
    status = registry.status("mine")
    assert (status.size, status.committed, status.in_use, status.digest) == (len(IMAGE), 300, False, algorithm)
    with registry.begin("mine", len(IMAGE), algorithm).attached() as upload:
        assert upload.committed == 300
        for chunk in chunks([IMAGE], 77, upload.committed):
            upload.take(chunk)
        completed = upload.finish(digest_of([IMAGE], algorithm))
    assert completed.read.image == full_image()
    assert registry.usage == NOTHING


def test_one_upload_serves_one_stream(registry: Uploads, upload: Upload) -> None:
    with pytest.raises(Conflict, match="in use") as caught, registry.begin("one", len(IMAGE)).attached():
        pytest.fail("two streams")
    assert (caught.value.reason, caught.value.metadata) == ("UPLOAD_BUSY", {"upload_id": "one"})
    assert registry.status("one").in_use
    assert upload.take(chunk_of(IMAGE[100:150], 100)) == 150


def test_what_is_not_attached_takes_nothing(registry: Uploads) -> None:
    upload = registry.begin(None, len(IMAGE))
    with pytest.raises(RuntimeError, match="not attached"):
        upload.take(chunk_of(IMAGE[:5], 0))
    with pytest.raises(RuntimeError, match="not attached"):
        upload.finish(digest_of([IMAGE]))
    assert upload.committed == 0


def test_an_id_belongs_to_one_size_and_algorithm(registry: Uploads, upload: Upload) -> None:
    assert registry.begin("one", len(IMAGE)) is upload
    for arguments in ((len(IMAGE) + 1,), (len(IMAGE), SHA256), (0,)):
        with pytest.raises(Conflict, match=f"has {len(IMAGE)} bytes and a blake3 digest") as caught:
            registry.begin("one", *arguments)
        assert caught.value.reason == "UPLOAD_DIFFERS"
    assert registry.usage == UploadUsage(1, len(IMAGE), 100)


@pytest.mark.parametrize("name", ["", "a/b", "a b", "é", "x" * 129, "a\n", "\u0663", "\0"], ids=ascii)
def test_an_id_of_other_characters_is_refused(registry: Uploads, name: str) -> None:
    for call in (lambda name: registry.begin(name, 100), registry.status, registry.drop):
        with pytest.raises(InvalidRequest) as caught:
            call(name)
        assert caught.value.violations[0].field == "upload_id"
    assert registry.usage == NOTHING


def test_ids_are_up_to_128_letters_or_made_here(registry: Uploads) -> None:
    assert registry.begin("A-z_0.9" + "x" * 121, 100).id == "A-z_0.9" + "x" * 121
    first, second = registry.begin(None, 100), registry.begin(None, 100)
    assert first.id != second.id
    assert len(first.id) == 32
    assert registry.begin(first.id, 100) is first


# What is refused and changes nothing


@pytest.mark.parametrize("offset", [0, 99, 101, 1 << 70, -1])
def test_a_chunk_of_another_place_is_told_the_right_one(registry: Uploads, upload: Upload, offset: int) -> None:
    with pytest.raises(OutOfRange, match="goes on at 100") as caught:
        upload.take(chunk_of(IMAGE[:100], offset))
    assert (caught.value.reason, caught.value.metadata) == ("WRONG_OFFSET", {"committed": "100"})
    assert_goes_on(registry, upload)


def test_a_damaged_chunk_is_not_committed(registry: Uploads, upload: Upload) -> None:
    chunk = chunk_of(IMAGE[100:200], 100)
    with pytest.raises(DataLoss):
        upload.take(dataclasses.replace(chunk, data=IMAGE[100:199] + b"\xff"))
    assert_goes_on(registry, upload)


def test_no_chunk_goes_beyond_the_end(registry: Uploads, upload: Upload) -> None:
    with pytest.raises(OutOfRange, match=f"beyond the {len(IMAGE)} bytes") as caught:
        upload.take(chunk_of(IMAGE[100:] + b"x", 100))
    assert caught.value.reason == "UPLOAD_TOO_LONG"
    assert_goes_on(registry, upload)


def test_an_empty_chunk_is_refused(registry: Uploads, upload: Upload) -> None:
    with pytest.raises(InvalidRequest):
        upload.take(chunk_of(b"", 100))
    assert_goes_on(registry, upload)


def test_an_upload_is_not_finished_before_all_bytes_came(registry: Uploads, upload: Upload) -> None:
    with pytest.raises(OutOfRange, match=f"100 of {len(IMAGE)} bytes") as caught:
        upload.finish(digest_of([IMAGE]))
    assert (caught.value.reason, caught.value.metadata) == ("UPLOAD_INCOMPLETE", {"committed": "100"})
    assert_goes_on(registry, upload)


@pytest.mark.parametrize("digest", ["", "sha256:" + "0" * 64, "blake3:xyz"])
def test_a_digest_that_is_none_may_be_given_again(registry: Uploads, upload: Upload, digest: str) -> None:
    upload.take(chunk_of(IMAGE[100:], 100))
    with pytest.raises(InvalidRequest):
        upload.finish(digest)
    assert upload.finish(digest_of([IMAGE])).read.image == full_image()


def assert_goes_on(registry: Uploads, upload: Upload) -> None:
    """Nothing changed, and the rest of IMAGE still makes it whole."""
    assert upload.committed == 100
    assert registry.usage == UploadUsage(1, len(IMAGE), 100)
    upload.take(chunk_of(IMAGE[100:], 100))
    assert upload.finish(digest_of([IMAGE])).buffer == IMAGE


# What loses the upload


def test_another_digest_loses_the_upload(registry: Uploads, upload: Upload) -> None:
    upload.take(chunk_of(IMAGE[100:], 100))
    with pytest.raises(DataLoss) as caught:
        upload.finish(digest_of([IMAGE, b"x"]))
    assert caught.value.reason == "DIGEST_MISMATCH"
    assert_lost(registry, upload)


def test_garbage_is_refused_at_its_first_chunk(registry: Uploads) -> None:
    with registry.begin("one", 1 << 20).attached() as upload:
        with pytest.raises(ImageError) as caught:
            upload.take(chunk_of(b"GGUF" * 100, 0))
        assert caught.value.reason == "NO_IMAGE"
        assert_lost(registry, upload)


def test_a_payload_that_lies_is_refused_before_its_bytes_come(registry: Uploads) -> None:
    start = SOUND[: -len(payload(MemoryKind.HYBRID))]
    with registry.begin("one", 1 << 20).attached() as upload:
        upload.take(chunk_of(start, 0))
        with pytest.raises(PayloadError, match="target state"):
            upload.take(chunk_of(struct.pack("<II", 1, 1 << 31) + bytes(100), len(start)))
        assert_lost(registry, upload)


def test_an_image_that_ends_too_early_is_refused_at_the_end(registry: Uploads) -> None:
    data = SOUND[:-5]
    with registry.begin("one", len(data)).attached() as upload:
        upload.take(chunk_of(data, 0))
        with pytest.raises(ImageError, match="ends in the middle"):
            upload.finish(digest_of([data]))
        assert_lost(registry, upload)


def test_a_failure_that_nobody_expected_loses_the_upload() -> None:
    class Broken(ImageReader):
        def feed(self, data: bytes | memoryview) -> list[Any]:
            raise ZeroDivisionError

    readers = iter([Broken(), ImageReader()])
    registry = uploads(reader=lambda: next(readers))
    with registry.begin("one", len(IMAGE)).attached() as upload:
        with pytest.raises(ZeroDivisionError):
            upload.take(chunk_of(IMAGE, 0))
        assert_lost(registry, upload)


def assert_lost(registry: Uploads, upload: Upload) -> None:
    """Nothing is left, also not of its id."""
    assert registry.usage == NOTHING
    assert registry.next_expiry is None
    with pytest.raises(NotFound) as caught:
        registry.status("one")
    assert (caught.value.reason, caught.value.metadata) == ("UPLOAD_NOT_FOUND", {"upload_id": "one"})
    with pytest.raises(NotFound):
        upload.take(chunk_of(IMAGE[upload.committed :], upload.committed))
    with pytest.raises(NotFound):
        upload.finish(digest_of([IMAGE]))
    with registry.begin("one", len(IMAGE)).attached() as again:
        again.take(chunk_of(IMAGE, 0))
        assert registry.usage == UploadUsage(1, len(IMAGE), len(IMAGE))
        assert again.finish(digest_of([IMAGE])).buffer == IMAGE


# Limits


def test_announced_bytes_count_from_the_beginning() -> None:
    registry = uploads(max_bytes=1000)
    registry.begin("a", 600)
    with pytest.raises(Exhausted, match="600 bytes; with 401 more they exceed 1000") as caught:
        registry.begin("b", 401)
    assert (caught.value.reason, caught.value.retry_after) == ("UPLOADS_FULL", 1.0)
    registry.begin("b", 400)
    assert registry.usage == UploadUsage(2, 1000, 0)
    registry.drop("a")
    registry.begin("c", 600)


def test_what_can_never_fit_is_not_told_to_try_again() -> None:
    registry = uploads(max_bytes=1000)
    with pytest.raises(Exhausted, match="limit is 1000") as caught:
        registry.begin(None, 1001)
    assert (caught.value.reason, caught.value.retry_after) == ("UPLOAD_TOO_LARGE", None)


def test_uploads_are_limited_in_number() -> None:
    registry = uploads(max_uploads=2)
    registry.begin("a", 1)
    registry.begin("b", 1)
    assert registry.begin("a", 1).id == "a"
    with pytest.raises(Exhausted, match="limit is 2") as caught:
        registry.begin("c", 1)
    assert caught.value.retry_after == 1.0


@pytest.mark.parametrize("size", [0, -1, -(1 << 70)])
def test_an_upload_has_at_least_a_byte(registry: Uploads, size: int) -> None:
    with pytest.raises(InvalidRequest):
        registry.begin(None, size)
    assert registry.usage == NOTHING


def test_an_unknown_algorithm_is_refused(registry: Uploads) -> None:
    with pytest.raises(InvalidRequest):
        registry.begin("a", 100, "md5")
    assert registry.usage == NOTHING


@pytest.mark.parametrize("size", [1 << 50, 1 << 62, 1 << 70])
def test_more_than_the_machine_has_is_refused(size: int) -> None:
    registry = uploads(max_bytes=1 << 80)
    with pytest.raises(Exhausted) as caught:
        registry.begin(None, size)
    assert caught.value.reason == "NO_MEMORY"
    assert registry.usage == NOTHING


def test_a_finished_upload_counts_until_its_stream_is_done(registry: Uploads, clock: Clock, upload: Upload) -> None:
    upload.take(chunk_of(IMAGE[100:], 100))
    upload.finish(digest_of([IMAGE]))
    clock.now += 1e6
    assert registry.expire() == ()
    assert registry.next_expiry is None
    assert registry.usage == UploadUsage(1, len(IMAGE), len(IMAGE))
    with pytest.raises(Conflict):
        registry.drop("one")
    for call in (lambda: upload.finish(digest_of([IMAGE])), lambda: upload.take(chunk_of(b"x", len(IMAGE)))):
        with pytest.raises(NotFound):
            call()


# Time


def test_an_upload_expires_when_it_was_not_used_for_its_time_to_live(registry: Uploads, clock: Clock) -> None:
    assert registry.next_expiry is None
    with registry.begin("one", len(IMAGE)).attached() as upload:
        clock.now += 30
        upload.take(chunk_of(IMAGE[:100], 0))
        clock.now += 50
    assert registry.next_expiry == registry.status("one").expires_at == clock.now + 60
    clock.now += 59.9
    assert registry.expire() == ()
    assert registry.status("one").committed == 100
    clock.now += 0.2
    assert registry.expire() == ("one",)
    assert_lost(registry, attached_without_end(upload))


def attached_without_end(upload: Upload) -> Upload:
    """As one whose stream is still there."""
    with pytest.raises(NotFound), upload.attached():
        pytest.fail("it is gone")
    upload.in_use = True
    return upload


def test_the_next_expiry_is_that_of_the_one_used_least_recently(registry: Uploads, clock: Clock) -> None:
    registry.begin("a", 100)
    clock.now += 10
    registry.begin("b", 100)
    assert registry.next_expiry == 1060.0
    with registry.begin("a", 100).attached():
        pass
    assert registry.next_expiry == 1070.0
    clock.now = 1070.0
    assert registry.expire() == ("a", "b")


def test_a_stalled_stream_loses_its_upload_and_not_the_one_that_took_its_id(
    registry: Uploads, clock: Clock, upload: Upload
) -> None:
    clock.now += 59
    upload.take(chunk_of(IMAGE[100:101], 100))
    clock.now += 59
    assert registry.expire() == ()
    clock.now += 1
    assert registry.expire() == ("one",)
    new = registry.begin("one", len(IMAGE))
    assert new is not upload
    with pytest.raises(NotFound):
        upload.take(chunk_of(IMAGE[101:], 101))
    assert registry.begin("one", len(IMAGE)) is new


def test_an_upload_that_is_dropped_while_it_fails_does_not_take_the_next_one_with_it() -> None:
    """As can be where chunks are taken on another thread."""

    class Slow(ImageReader):
        def feed(self, data: bytes | memoryview) -> list[Any]:
            registry.drop("one")
            registry.begin("one", 10)
            return super().feed(data)

    readers = iter([Slow(), ImageReader()])
    registry = uploads(reader=lambda: next(readers))
    with registry.begin("one", 100).attached() as upload, pytest.raises(ImageError):
        upload.take(chunk_of(bytes(100), 0))
    assert registry.usage == UploadUsage(1, 10, 0)


def test_a_new_upload_does_not_wait_for_those_that_are_due(registry: Uploads, clock: Clock) -> None:
    registry.begin("old", 1 << 20)
    clock.now += 60
    registry.begin("new", 1 << 20)
    with pytest.raises(NotFound):
        registry.status("old")


def test_a_dropped_upload_ends_its_stream(registry: Uploads, upload: Upload) -> None:
    registry.drop("one")
    assert_lost(registry, upload)
    with pytest.raises(NotFound):
        registry.drop("one")


# Everything at once


class AnyOrder(RuleBasedStateMachine):
    """Streams that do what they like; what is counted is what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.registry = uploads(clock=self.clock, max_bytes=3 * len(IMAGE), max_uploads=3)
        self.streams: list[tuple[Upload, Any]] = []
        self.known: dict[str, int] = {}

    @rule(name=st.sampled_from("abcd"), extra=st.sampled_from([0, 0, 0, 1]))
    def attach(self, name: str, extra: int) -> None:
        try:
            upload = self.registry.begin(name, len(IMAGE) + extra)
            stream = upload.attached()
            stream.__enter__()
        except (Conflict, Exhausted):
            return
        self.streams.append((upload, stream))

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def detach(self, data: st.DataObject) -> None:
        _, stream = self.streams.pop(data.draw(st.integers(0, len(self.streams) - 1)))
        stream.__exit__(None, None, None)

    @precondition(lambda self: self.streams)
    @rule(data=st.data(), wrong=st.sampled_from([0, 0, 0, 1, -1]), size=st.integers(1, 2000), bad=st.booleans())
    def take(self, data: st.DataObject, wrong: int, size: int, bad: bool) -> None:
        upload, _ = data.draw(st.sampled_from(self.streams))
        before = upload.committed
        piece = (IMAGE + b"xx")[before : before + size]
        piece = b"\0" * len(piece) if bad else piece
        try:
            upload.take(chunk_of(piece, before + wrong))
        except SlotwireError:
            assert upload.committed == before
        else:
            assert (wrong, upload.committed) == (0, before + len(piece))

    @precondition(lambda self: self.streams)
    @rule(data=st.data(), right=st.booleans())
    def finish(self, data: st.DataObject, right: bool) -> None:
        upload, _ = data.draw(st.sampled_from(self.streams))
        whole = IMAGE + b"x" * (upload.size - len(IMAGE))
        try:
            completed = upload.finish(digest_of([whole if right else b""]))
        except SlotwireError:
            return
        assert completed.buffer == whole
        assert completed.read.image == full_image()

    @rule(name=st.sampled_from("abcd"))
    def drop(self, name: str) -> None:
        try:
            self.registry.drop(name)
        except (Conflict, NotFound):
            return
        with pytest.raises(NotFound):
            self.registry.status(name)

    @rule(seconds=st.sampled_from([1, 30, 61]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        due = self.registry.next_expiry
        gone = self.registry.expire()
        assert bool(gone) == (due is not None and due <= self.clock.now)

    @invariant()
    def what_is_counted_is_what_is_there(self) -> None:
        statuses = []
        for name in "abcd":
            try:
                statuses.append(self.registry.status(name))
            except NotFound:
                continue
        usage = self.registry.usage
        assert usage.uploads == len(statuses) <= 3
        assert usage.reserved_bytes == sum(status.size for status in statuses) <= 3 * len(IMAGE)
        assert usage.committed_bytes == sum(status.committed for status in statuses)
        if not self.streams:
            assert not any(status.in_use for status in statuses)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# Memory


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def test_a_promise_takes_no_memory() -> None:
    size = 1 << 30
    registry = uploads(max_bytes=1 << 50, max_uploads=100)
    before = resident_bytes()
    with registry.begin("big", size).attached() as upload:
        upload.take(chunk_of(IMAGE[:100], 0))
        assert resident_bytes() - before < 8 << 20


def test_a_lost_upload_gives_its_memory_back_at_once() -> None:
    """Without a run of the garbage collector, although a reader refers to itself."""
    gc.collect()
    gc.disable()
    try:
        registry = uploads()
        with registry.begin("one", len(IMAGE)).attached() as upload:
            upload.take(chunk_of(IMAGE[:-100], 0))
            assert upload._arrival is not None
            buffer = weakref.ref(upload._arrival.buffer.obj)
            assert buffer() is not None
            registry.drop("one")
            assert buffer() is None
    finally:
        gc.enable()


def test_a_completed_image_outlives_its_upload() -> None:
    registry = uploads()
    completed = sent(IMAGE, 500, registry)
    assert registry.usage == NOTHING
    target = completed.read.image.target
    del completed, registry
    assert target == full_image().target


MEASURE = """
import struct
from service.state.integrity import chunks, digest_of
from service.state.uploads import Uploads

row, cells = 1 << 20, 48
rows = bytes(row)

def pieces():
    yield struct.pack("<IIIiII", 0x67677371, 3, 1, 5, 1, cells)
    yield b"".join(struct.pack("<iIi", cell, 1, 0) for cell in range(cells)) + struct.pack("<II", 0, 1)
    for _ in range(2):
        yield struct.pack("<iQ", 0, row)
        yield from [rows] * cells

def memory(field):
    (line,) = (line for line in open("/proc/self/status") if line.startswith(field + ":"))
    return 1024 * int(line.split()[1])

size, digest = sum(map(len, pieces())), digest_of(pieces())
uploads = Uploads(max_uploads=1, max_bytes=size, time_to_live=60.0)
before = memory("VmRSS")
with uploads.begin(None, size).attached() as upload:
    for chunk in chunks(pieces(), 256 << 10):
        upload.take(chunk)
    completed = upload.finish(digest)
    assert completed.read.payload.bytes == len(completed.read.image.target) > 96 << 20
print(size, memory("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the peak")
def test_an_upload_takes_as_much_memory_as_it_has_bytes() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", MEASURE], cwd=root, capture_output=True, text=True, check=True)
    size, taken = map(int, done.stdout.split())
    assert size < taken < 1.1 * size
