"""Chunks, their checksums, and digests: against published values, over any pieces, and with one bit wrong."""

from __future__ import annotations

import hashlib
import itertools
import mmap

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import DataLoss, InvalidRequest, OutOfRange
from service.state.image import image_pieces, read_image
from service.state.integrity import BLAKE3, SHA256, Chunk, Digest, chunk_of, chunks, digest_name, digest_of
from tests.unit.images import GOLDEN, full_image, written

PIECES = st.lists(st.binary(max_size=40), max_size=12)
CHECK_VALUES = {
    b"": 0,
    b"123456789": 0xE3069283,
    bytes(32): 0x8A9136AA,
    b"\xff" * 32: 0x62A8AB43,
    bytes(range(32)): 0x46DD794E,
}
"""The check value of the CRC catalogue, and those of RFC 3720, B.4."""
EMPTY_BLAKE3 = "blake3:af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
"""Of BLAKE3's published test vectors."""


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


@pytest.mark.parametrize("data", CHECK_VALUES)
def test_checksums_are_those_of_rfc_3720(data: bytes) -> None:
    assert chunk_of(data, 0).crc32c == CHECK_VALUES[data]


@given(PIECES, st.integers(1, 60), st.integers(0, 60))
def test_chunks_are_the_bytes_of_any_pieces_from_any_offset(pieces: list[bytes], size: int, offset: int) -> None:
    whole = b"".join(pieces)
    offset = min(offset, len(whole))
    cut = list(chunks(pieces, size, offset))
    assert b"".join(chunk.data for chunk in cut) == whole[offset:]
    assert [chunk.offset for chunk in cut] == list(range(offset, len(whole), size))
    assert all(len(chunk.data) == size for chunk in cut[:-1])
    for chunk in cut:
        chunk.check()


def test_an_image_resumed_at_any_byte_is_the_same_image() -> None:
    image = full_image()
    whole = written(image)
    for offset in range(0, len(whole), 29):
        rest = b"".join(chunk.data for chunk in chunks(image_pieces(image), 64, offset))
        assert whole[:offset] + rest == whole
        assert read_image(whole[:offset] + rest).image == image


def test_a_chunk_inside_one_piece_is_a_view_of_it() -> None:
    piece = bytes(range(100))
    *inside, border, last = chunks([piece, b"abc", b"d" * 30], 30)
    assert len(inside) == 3
    for chunk in inside:
        assert isinstance(chunk.data, memoryview)
        assert chunk.data.obj is piece
    assert border.data == piece[90:] + b"abc" + b"d" * 17
    assert last.data == b"d" * 13


def test_what_is_before_the_offset_is_not_touched() -> None:
    with mmap.mmap(-1, 64 << 20) as pages:
        before = resident_bytes()
        (last,) = chunks([memoryview(pages)], 64 << 20, len(pages) - 10)
        assert last.data == bytes(10)
        assert resident_bytes() - before < 8 << 20
        del last


def test_chunks_come_before_later_pieces_are_asked_for() -> None:
    cut = chunks(itertools.chain([b"abcdef"], (pytest.fail("too early") for _ in range(1))), 3)
    assert [next(cut).data, next(cut).data] == [b"abc", b"def"]


def test_an_offset_beyond_the_end_says_where_the_end_is() -> None:
    assert list(chunks([b"abc", b"d"], 2, 4)) == []
    with pytest.raises(OutOfRange, match="offset 5 is beyond the 4 bytes") as caught:
        list(chunks([b"abc", b"d"], 2, 5))
    assert caught.value.metadata == {"size": "4"}


@pytest.mark.parametrize(("size", "offset"), [(0, 0), (-1, 0), (1, -1)])
def test_chunks_of_no_size_or_before_the_beginning_are_a_mistake(size: int, offset: int) -> None:
    with pytest.raises(ValueError, match="chunks of"):
        next(chunks([b"a"], size, offset))


@given(st.binary(min_size=1, max_size=200), st.data())
def test_a_flipped_bit_is_found_in_the_data_and_in_the_checksum(data: bytes, draw: st.DataObject) -> None:
    chunk = chunk_of(data, 1000)
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(DataLoss, match=f"{len(data)} bytes at 1000") as caught:
        Chunk(1000, bytes(damaged), chunk.crc32c).check()
    assert (caught.value.reason, caught.value.metadata) == ("CHUNK_DAMAGED", {"offset": "1000"})
    with pytest.raises(DataLoss):
        Chunk(1000, data, chunk.crc32c ^ 1 << bit % 32).check()


def test_digests_are_the_published_ones() -> None:
    assert Digest().text() == EMPTY_BLAKE3
    data = GOLDEN[0].read_bytes()
    assert digest_of([data], SHA256) == "sha256:" + hashlib.sha256(data).hexdigest()


@given(PIECES, st.sampled_from([BLAKE3, SHA256]))
def test_a_digest_does_not_depend_on_the_pieces(pieces: list[bytes], name: str) -> None:
    assert digest_of(map(memoryview, pieces), name) == digest_of([b"".join(pieces)], name)
    assert digest_of([*pieces, b"x"], name) != digest_of(pieces, name)


@pytest.mark.parametrize("name", [BLAKE3, SHA256])
def test_a_digest_is_compared_by_value(name: str) -> None:
    digest = Digest(name)
    digest.update(b"some")
    early = digest.text()
    digest.update(b"thing")
    digest.check(digest_of([b"something"], name))
    digest.check(f"{name}:{digest.text().partition(':')[2].upper()}")
    with pytest.raises(DataLoss, match="have the digest") as caught:
        digest.check(early)
    assert caught.value.reason == "DIGEST_MISMATCH"
    with pytest.raises(InvalidRequest, match=name):
        digest.check(digest_of([b"something"], SHA256 if name == BLAKE3 else BLAKE3))


ZEROS = "0" * 64


@pytest.mark.parametrize("digits", ["", ZEROS[1:], ZEROS + "0", ZEROS + "\n", "g" + ZEROS[1:], "\u0663" + ZEROS[1:]])
@pytest.mark.parametrize("name", ["blake3:", "sha256:", "BLAKE3:", "md5:", "blake3", ":", ""])
def test_a_text_that_is_no_digest_is_refused(name: str, digits: str) -> None:
    text = name + digits
    with pytest.raises(InvalidRequest) as caught:
        digest_name(text)
    assert caught.value.violations[0].field == "digest"
    with pytest.raises(InvalidRequest):
        Digest().check(text)


def test_an_unknown_algorithm_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="blake3, sha256"):
        Digest("md5")
