"""Slot images: real ones, ones cut into pieces, damaged ones, and ones that lie."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import struct
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.state.errors import ImageError, ManifestError, PayloadError
from service.state.image import ImageRead, SlotImage, image_pieces, image_size, read_image, section_pieces
from service.state.layout import SECTION_MAGICS, Limits, Section
from service.state.manifest import Manifest, decode
from service.state.memory import MemoryKind
from service.state.parts import Blob, Dropped, Header, Piece, Role, SectionEnd
from service.state.reader import ImageReader
from service.state.sections import Checkpoint, Draft
from service.state.tokens import TokenList
from tests.unit.images import GOLDEN, PREFIX, attention_cache, full_image, manifest, payload, small_image, written

PROMPT = (0, 620, 290, 417, 286, 1394, 65, 412, 912, 263, 491, 431, 15, 534, 272, 544, 312, 263, 549, 13, 961)
"""The 21 tokens of the prompt of all golden files."""
SCKP, SDFT, SLWM = (struct.pack("<II", SECTION_MAGICS[section], 1) for section in SECTION_MAGICS)
FEW_MEGABYTES = 3 << 20


def plain(**changes: object) -> SlotImage:
    """An image without anything behind the target state."""
    image = SlotImage(3, TokenList.of((5, 6, 7)), payload(MemoryKind.HYBRID))
    return dataclasses.replace(image, **changes)  # type: ignore[arg-type]


def cut(data: bytes, places: Iterable[int]) -> list[bytes]:
    bounds = [0, *sorted(places), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(bounds)]


def dropped(data: bytes, **options: object) -> str:
    """The reason for the one section that was dropped; the target state is as in `plain`."""
    read = read_image(data, **options)  # type: ignore[arg-type]
    assert read.image.target == plain().target
    (reason,) = read.dropped.values()
    return reason


# Real files


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
@pytest.mark.parametrize("kind", [None, MemoryKind.HYBRID])
def test_a_file_of_a_real_server_is_read_and_written_byte_for_byte(path: Path, kind: MemoryKind | None) -> None:
    data = path.read_bytes()
    read = read_image(data, target=kind, draft=kind, layers=8)
    assert b"".join(image_pieces(read.image)) == data
    assert image_size(read.image) == len(data)
    assert not read.dropped
    assert not read.unknown

    image = read.image
    assert image.version == int(path.stem.partition("state")[2][0])
    assert image.tokens.packed == ("plain" not in path.stem)
    assert len(image.tokens) == 44
    assert tuple(image.tokens.ids[:21]) == PROMPT
    attention, recurrent = read.payload.caches
    assert (attention.cells, attention.first_position, attention.last_position) == (44, 0, 43)
    assert (attention.layers, len(attention.layer_bytes), recurrent.layers) == (3, 3, 8)
    assert (recurrent.cells, recurrent.last_position, len(recurrent.layer_bytes)) == (1, 43, 5)
    assert attention.rotation == ((0, 0) if image.version == 4 else None)


@pytest.mark.parametrize("path", [path for path in GOLDEN if "sckp" in path.stem], ids=lambda path: path.stem)
def test_a_real_context_checkpoint_is_what_the_server_made(path: Path) -> None:
    read = read_image(path.read_bytes())
    (checkpoint,) = read.image.checkpoints
    assert (checkpoint.tokens, checkpoint.first_position, checkpoint.last_position) == (17, 16, 16)
    assert (len(checkpoint.target), len(checkpoint.speculative)) == (7828, 0)
    assert len(checkpoint.draft) == (1612 if "draft" in path.stem else 0)
    target = read.payloads[Blob(Section.CHECKPOINTS, Role.TARGET, 0)]
    assert target.caches == (dataclasses.replace(read.payload.caches[1], first_position=16, last_position=16),)


def test_the_state_of_different_library_versions_has_different_shapes() -> None:
    shapes = {read_image(path.read_bytes()).payload.shape for path in GOLDEN}
    assert len(shapes) == 2  # with and without the rotation of version 4


# Whole images


@pytest.mark.parametrize("kind", MemoryKind)
@pytest.mark.parametrize("version", [2, 3, 4])
def test_an_image_with_all_sections_comes_back(kind: MemoryKind, version: int) -> None:
    image = full_image(kind, version=version)
    read = read_image(written(image), target=kind)
    assert read.image == image
    assert not read.dropped


def test_a_draft_of_another_kind_of_memory_is_dropped() -> None:
    # of the full image's drafts, the one in a checkpoint is recurrent and the other is not
    assert read_image(written(full_image()), draft=MemoryKind.ATTENTION).dropped.keys() == {Section.CHECKPOINTS}
    assert read_image(written(full_image()), draft=MemoryKind.RECURRENT).dropped.keys() == {Section.DRAFT}


def test_a_whole_image_in_one_piece_is_read_and_written_without_copies_of_the_target_state() -> None:
    data = written(full_image())
    image = read_image(data).image
    assert isinstance(image.target, memoryview)
    assert image.target.obj is data
    assert any(piece is image.target for piece in image_pieces(image))


def test_the_pieces_of_the_sections_are_the_image() -> None:
    image = full_image()
    parts = b"".join(b"".join(section_pieces(image, section)) for section in Section)
    assert written(image)[12:] == parts


@settings(max_examples=40, deadline=None)
@given(kind=st.sampled_from(MemoryKind), known=st.booleans(), places=st.sets(st.integers(0, 1200), max_size=40))
def test_an_image_comes_back_however_it_is_cut(kind: MemoryKind, known: bool, places: set[int]) -> None:
    image = full_image(kind)
    data = written(image)
    pieces = cut(data, (place for place in places if place < len(data)))
    assert read_image(pieces, target=kind if known else None).image == image


def test_an_image_comes_back_byte_by_byte_from_a_buffer_that_is_used_again() -> None:
    image, buffer = full_image(), bytearray(1)
    reader = ImageReader()
    target = bytearray()
    for byte in written(image):
        buffer[0] = byte
        for part in reader.feed(memoryview(buffer)):
            if isinstance(part, Piece) and part.blob.section is Section.TARGET:
                target += part.data
    assert reader.finish() == []
    assert target == image.target


blobs = st.binary(max_size=40)
tokens = st.lists(st.integers(0, 2**31 - 1), max_size=20).map(TokenList.of)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.text(), json_values, max_size=4)
manifests = st.builds(
    Manifest,
    fingerprint=objects,
    model=st.text(),
    tokens=st.integers(0, 1 << 24),
    created=st.floats(0, 1e10),
    pending_token=st.none() | st.integers(0, 2**31 - 1),
    sampling=st.none() | objects,
    speculation=st.none() | objects,
    digests=st.dictionaries(st.text(), st.text(), max_size=3),
    extra=objects.map(lambda value: {f"new {key}": item for key, item in value.items()}),
)


@st.composite
def images(draw: st.DrawFn) -> SlotImage:
    kind = draw(st.sampled_from(MemoryKind))
    version = draw(st.sampled_from((2, 3, 4)))
    listed = draw(tokens)

    def blob(partial: bool) -> bytes:
        return PREFIX + payload(kind, draw(st.integers(0, 4)), version=version, partial=partial)

    checkpoints = [
        Checkpoint(
            draw(st.integers(0, len(listed))),
            *sorted((draw(st.integers(0, 99)), draw(st.integers(0, 99)))),
            draw(st.just(b"") | st.just(blob(True))),
            draw(st.just(b"") | st.just(blob(True))),
            draw(blobs),
        )
        for _ in range(draw(st.integers(0, 3)))
    ]
    return SlotImage(
        version,
        listed,
        payload(kind, draw(st.integers(0, 4)), version=version),
        tuple(checkpoints),
        draw(st.none() | st.builds(Draft, st.just(b"") | st.just(blob(False)), blobs)),
        draw(st.none() | manifests),
    )


@settings(max_examples=50, deadline=None)
@given(image=images(), seed=st.integers())
def test_every_image_comes_back(image: SlotImage, seed: int) -> None:
    data = written(image)
    assert image_size(image) == len(data)
    places = random.Random(seed).sample(range(len(data)), k=5)
    read = read_image(cut(data, places))
    assert read.image == image
    assert not read.dropped


# Tokens


def test_tokens_are_packed_and_older_plain_lists_stay_plain() -> None:
    packed = TokenList.of((1, 2, 3))
    assert packed.pack() == struct.pack("<iIIiiiI", -1, 1, 3, 1, 2, 3, 0)
    old = TokenList(struct.pack("<3i", 1, 2, 3), packed=False)
    assert old.pack() == old.data
    assert list(old.ids) == list(packed.ids) == [1, 2, 3]
    data = written(plain(tokens=old))
    assert read_image(data).image.tokens == old


def test_a_list_with_pictures_is_kept_as_it_is() -> None:
    listed = TokenList(struct.pack("<3i", 1, -1, -1), media=struct.pack("<II", 1, 1) + b"\4\0\0\0pict")
    assert listed.has_media
    assert read_image(written(plain(tokens=listed))).image.tokens == listed


@pytest.mark.parametrize(
    "words",
    [
        struct.pack("<i", -1),
        struct.pack("<iIII", -1, 2, 0, 0),
        struct.pack("<iIII", -1, 1, 2**32 - 1, 0),
        struct.pack("<iIII", -1, 1, 1, 0),
        struct.pack("<iIIII", -1, 1, 0, 0, 0),
        struct.pack("<iIIiI", -1, 1, 1, -1, 0),
        struct.pack("<ii", 5, -2),
    ],
)
def test_a_bad_token_list_makes_an_image_useless(words: bytes) -> None:
    data = struct.pack("<III", 0x67677371, 3, len(words) // 4) + words + payload(MemoryKind.HYBRID)
    with pytest.raises(ImageError):
        read_image(data)


# Bad images


@pytest.mark.parametrize(
    ("data", "reason", "code"),
    [
        (b"", "the header", "BAD_IMAGE"),
        (b"GGUF" + bytes(40), "no slot image", "NO_IMAGE"),
        (struct.pack("<III", 0x67677371, 5, 0), "state version 5", "STATE_VERSION"),
        (struct.pack("<III", 0x67677371, 3, 2**32 - 1), "4294967295 tokens", "BAD_IMAGE"),
        (struct.pack("<III", 0x67677371, 3, 9), "in the middle of the tokens", "BAD_IMAGE"),
        (struct.pack("<III", 0x67677371, 3, 0), "target state: ends in the middle of", "BAD_PAYLOAD"),
    ],
)
def test_what_makes_an_image_useless_is_told(data: bytes, reason: str, code: str) -> None:
    with pytest.raises(ImageError, match=reason) as caught:
        read_image(data)
    assert caught.value.reason == code


def test_the_place_of_an_error_is_counted_from_the_start_of_the_image() -> None:
    data = bytearray(written(plain()))
    start = 12 + 4 * 7
    data[start : start + 4] = b"\xff\xff\xff\xff"
    with pytest.raises(PayloadError) as caught:
        read_image(bytes(data), target=MemoryKind.HYBRID)
    assert caught.value.offset == start


def test_a_state_for_another_kind_of_memory_is_an_error() -> None:
    with pytest.raises(PayloadError):
        read_image(written(plain()), target=MemoryKind.SLIDING_WINDOW)
    with pytest.raises(PayloadError):
        read_image(written(plain()), target=MemoryKind.HYBRID, layers=4)


@pytest.mark.parametrize("known", [None, MemoryKind.HYBRID])
@pytest.mark.parametrize("magic", [b"NEW!", struct.pack("<I", 0xDEADBEEF), b"SC"])
def test_reading_stops_content_at_what_it_does_not_know(known: MemoryKind | None, magic: bytes) -> None:
    image = plain()
    rest = b"\xff" * 100 if len(magic) == 4 else b""
    read = read_image(written(image) + magic + rest + (written(full_image())[:50] if rest else b""), target=known)
    assert (read.image, read.unknown, read.dropped) == (image, magic, {})


def test_an_unknown_section_hides_those_behind_it() -> None:
    image = full_image()
    end = image_size(dataclasses.replace(image, draft=None, manifest=None))
    data = written(image)
    read = read_image(data[:end] + b"NEW!" + data[end:])
    assert read.image == dataclasses.replace(image, draft=None, manifest=None)


# Damaged sections


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        (SCKP[:4], "in the middle of its version"),
        (SCKP[:4] + struct.pack("<II", 2, 0), "version 2"),
        (SCKP + b"\1", "the number of checkpoints"),
        (SCKP + struct.pack("<I", 1025), "1025 checkpoints"),
        (SCKP + struct.pack("<IQ", 1, 0), "in the middle of checkpoint 0"),
        (SCKP + struct.pack("<IQiiQ", 1, 0, 0, 0, 2**63), f"{2**63} bytes"),
        (SCKP + struct.pack("<IQiiQ", 1, 0, 0, 0, 2**42) + b"x" * 40, "does not begin|in the middle"),
        (SCKP + struct.pack("<IQiiQQQ", 1, 4, 0, 0, 0, 0, 0), "checkpoint 0 has 4 tokens"),
        (SCKP + struct.pack("<IQiiQQQ", 1, 1, 1, 0, 0, 0, 0), "at positions 1 to 0"),
        (SCKP + struct.pack("<IQiiQQQ", 1, 1, -1, 0, 0, 0, 0), "at positions -1 to 0"),
        (SCKP + struct.pack("<IQiiQ", 1, 1, 0, 0, 3) + b"abc" + bytes(16), "target state of checkpoint 0 does not"),
        (SCKP + struct.pack("<IQiiQ", 1, 1, 0, 0, 8) + PREFIX + bytes(16), "target state of checkpoint 0: "),
        (SCKP + struct.pack("<IQiiQ", 1, 1, 0, 0, 9) + PREFIX + b"x" + bytes(16), "in the middle of"),
        (SDFT + struct.pack("<Q", 20) + PREFIX + bytes(12) + bytes(8), "the draft state: "),
        (SDFT + bytes(8), "the length of the speculative state"),
        (SLWM + struct.pack("<Q", (1 << 20) + 1), "1048577 bytes"),
        (SLWM + struct.pack("<Q", 2) + b"[]", "format|no JSON object"),
        (SLWM + struct.pack("<Q", 2) + b"{", "in the middle of the manifest"),
    ],
)
def test_a_damaged_section_is_dropped_with_its_reason_and_the_rest_counts(section: bytes, reason: str) -> None:
    data = written(plain()) + section
    found = dropped(data)
    assert [part for part in reason.split("|") if part in found], found


def test_a_section_that_is_damaged_inside_does_not_hide_the_next() -> None:
    image = full_image()
    broken = dataclasses.replace(image.checkpoints[0], target=PREFIX + b"rubbish")
    damaged = dataclasses.replace(image, checkpoints=(broken, image.checkpoints[1]))
    read = read_image(written(damaged))
    assert read.image == dataclasses.replace(image, checkpoints=())
    assert read.dropped.keys() == {Section.CHECKPOINTS}
    assert all(blob.section is not Section.CHECKPOINTS for blob in read.payloads)


def test_a_draft_that_keeps_nothing_of_its_own_is_sound() -> None:
    image = plain(draft=Draft(PREFIX))
    assert read_image(written(image), draft=MemoryKind.ATTENTION).image == image


def test_a_second_section_of_a_kind_takes_nothing_from_the_first() -> None:
    image = plain(draft=Draft(PREFIX + payload(MemoryKind.ATTENTION), b"first"))
    again = b"".join(section_pieces(image, Section.DRAFT))
    read = read_image(written(image) + again)
    assert read.image == image
    assert read.dropped == {Section.DRAFT: "it comes a second time"}


def test_parts_of_a_section_count_at_its_end() -> None:
    reader = ImageReader()
    parts = reader.feed(written(full_image()))
    assert parts[0] == Header(3)
    ends = [part for part in parts if isinstance(part, SectionEnd)]
    assert [end.section for end in ends] == [Section.CHECKPOINTS, Section.DRAFT, Section.MANIFEST]
    sizes = [len(b"".join(section_pieces(full_image(), end.section))) for end in ends]
    assert [end.size for end in ends] == sizes
    assert not any(isinstance(part, Dropped) for part in parts)


# The manifest


def test_a_manifest_keeps_what_it_does_not_know() -> None:
    known = manifest()
    value = json.loads(known.encode())
    assert value["format"] == 1
    assert value["from a newer version"] == [1, 2.5, None, "é"]
    assert decode(known.encode()) == known
    small = manifest(pending_token=None, sampling=None, speculation=None, digests={}, extra={})
    assert "sampling" not in json.loads(small.encode())
    assert decode(small.encode()) == small


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"format": "1"},
        {"format": True},
        {"tokens": -1},
        {"tokens": 10**400},
        {"tokens": None},
        {"created": -1},
        {"created": 10**400},
        {"created": float("nan")},
        {"pending_token": -1},
        {"pending_token": 1 << 31},
        {"fingerprint": []},
        {"model": 3},
        {"digests": {"target": 3}},
        {"sampling": "text"},
        {"model": "\ud800"},
        {"new": float("inf")},
    ],
)
def test_a_manifest_that_cannot_be_is_refused(change: dict[str, object]) -> None:
    value = json.loads(manifest().encode()) | change
    with pytest.raises(ManifestError):
        decode(json.dumps(value).encode())


@pytest.mark.parametrize("data", [b"", b"\xff", b"null", b"[" * 100_000, b"{}x", b'{"format":' + b"9" * 5000 + b"}"])
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(ManifestError):
        decode(data)


def test_a_manifest_that_cannot_be_read_is_not_written() -> None:
    for bad in (
        manifest(fingerprint={"a": object()}),
        manifest(extra={"x": float("nan")}),
        manifest(tokens=-1),
        manifest(model="x" * (1 << 20)),
    ):
        with pytest.raises(ManifestError):
            bad.encode()


# Hostile bytes


def survives(data: bytes, **options: object) -> ImageRead | None:
    try:
        read = read_image(data, **options)  # type: ignore[arg-type]
    except ImageError:
        return None
    assert written(read.image)
    return read


@pytest.mark.parametrize("known", [True, False])
def test_every_truncation_is_an_error_or_drops_what_is_cut(known: bool) -> None:
    image = small_image()
    data = written(image)
    without = [{"checkpoints": (), "draft": None}, {"draft": None}, {}]
    ends = [image_size(dataclasses.replace(image, manifest=None, **missing)) for missing in without]  # type: ignore[arg-type]
    for size in range(len(data)):
        read = survives(data[:size], target=MemoryKind.HYBRID if known else None)
        if size in ends:
            assert read is not None
            assert not read.dropped
            assert not read.unknown
        elif read is not None:
            assert read.dropped or read.unknown or size < ends[0]


def test_every_changed_byte_is_an_error_or_leaves_something_valid() -> None:
    data = written(small_image())
    dice = random.Random(1)
    for place in range(len(data)):
        for known, mask in ((MemoryKind.HYBRID, 1 << dice.randrange(8)), (None, 0xFF)):
            changed = bytearray(data)
            changed[place] ^= mask
            survives(bytes(changed), target=known)


def test_no_claim_takes_memory() -> None:
    data = written(small_image())
    claims = [struct.pack("<I", value) for value in (2**32 - 1, 2**31, 2**24, 2**20, 2**9)]
    claims += [struct.pack("<Q", value) for value in (2**63, 2**64 - 1, 2**40)]
    dice = random.Random(1)
    survives(data)
    tracemalloc.start()
    try:
        for place in range(0, len(data) - 8, 4):
            claim = dice.choice(claims)
            lie = data[:place] + claim + data[place + len(claim) :]
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            survives(lie)
            assert tracemalloc.get_traced_memory()[1] - before < FEW_MEGABYTES
    finally:
        tracemalloc.stop()


def test_a_large_state_goes_through_in_constant_memory() -> None:
    chunk = bytes(1 << 20)
    layers, row, cells = 4, 1 << 10, 1 << 14
    head = attention_cache(range(cells), layers=layers, row=row)
    meta = head[: 8 + 12 * cells + 8]
    del head
    reader = ImageReader(target=MemoryKind.ATTENTION)
    reader.feed(struct.pack("<III", 0x67677371, 3, 0))
    tracemalloc.start()
    try:
        reader.feed(meta)
        for _ in range(2 * layers):
            reader.feed(struct.pack("<iQ", 1, row))
            for _ in range(row * cells // len(chunk)):
                (piece,) = reader.feed(chunk)
                assert isinstance(piece, Piece)
                assert piece.data.obj is chunk
        assert tracemalloc.get_traced_memory()[1] < FEW_MEGABYTES
    finally:
        tracemalloc.stop()
    assert reader.finish()


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300), st.booleans())
def test_noise_behind_a_target_state_never_breaks_the_reader(noise: bytes, known: bool) -> None:
    survives(written(plain()) + noise, target=MemoryKind.HYBRID if known else None)
    survives(written(plain())[:40] + noise)
    for head in (SCKP, SDFT, SLWM):
        survives(written(plain()) + head + noise)


def test_limits_of_the_caller_hold() -> None:
    survivor = read_image(written(plain()), limits=Limits(tokens=3))
    assert len(survivor.image.tokens) == 3
    with pytest.raises(ImageError):
        read_image(written(plain()), limits=Limits(tokens=2))
    with pytest.raises(PayloadError):
        read_image(written(plain()), limits=Limits(state_bytes=20))
