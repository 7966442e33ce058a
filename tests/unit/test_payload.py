"""What llama.cpp writes for a sequence, found without a length and checked field by field."""

from __future__ import annotations

import struct
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.state.errors import PayloadError
from service.state.layout import LIMITS, SECTION_MAGICS, Limits, Section
from service.state.memory import CacheKind, MemoryKind
from service.state.payload import PayloadWalker, parse_payload
from tests.unit.images import F16, F32, Q8_0, attention_cache, payload, recurrent_cache

SCKP = struct.pack("<I", SECTION_MAGICS[Section.CHECKPOINTS])


def error_of(data: bytes, **options: object) -> PayloadError:
    with pytest.raises(PayloadError) as caught:
        parse_payload(data, **({"version": 3} | options))  # type: ignore[arg-type]
    return caught.value


def walk(data: bytes, kind: MemoryKind) -> None:
    walker = PayloadWalker(version=3, kind=kind)
    walker.feed(memoryview(data))
    walker.finish()


@pytest.mark.parametrize(("kind", "version", "tokens"), [*product(MemoryKind, (2, 3, 4), (0, 1, 3))])
def test_each_kind_of_memory_parses_when_it_is_known_and_when_it_is_not(
    kind: MemoryKind, version: int, tokens: int
) -> None:
    data = payload(kind, tokens, version=version)
    known = parse_payload(data, version=version, kind=kind)
    assert known.kind is kind
    assert known.bytes == len(data) == sum(cache.bytes for cache in known.caches)
    assert [cache.kind for cache in known.caches] == list(kind.caches)
    for cache in known.caches:
        cells = min(tokens, 1) if cache.kind is CacheKind.RECURRENT else tokens
        assert (cache.cells, cache.last_position) == (cells, tokens - 1 if tokens else None)
    assert parse_payload(data, version=version) == known


@pytest.mark.parametrize("kind", MemoryKind)
def test_a_partial_state_is_what_cannot_be_rolled_back(kind: MemoryKind) -> None:
    summary = parse_payload(payload(kind, partial=True), version=3, kind=kind, partial=True)
    assert [cache.kind for cache in summary.caches] == list(kind.partial)
    if len(kind.partial) < len(kind.caches):
        error_of(payload(kind, partial=True), kind=kind)


@pytest.mark.parametrize(
    ("values", "transposed", "extension", "kind", "streams"),
    [*product((True, False), (True, False), (0, 8, 12), (F32, F16, Q8_0), (1, 3))],
)
def test_every_layout_of_an_attention_cache_is_recognised(
    values: bool, transposed: bool, extension: int, kind: int, streams: int
) -> None:
    if transposed and kind == Q8_0:
        return
    data = attention_cache(
        range(5), values=values, transposed=transposed, extension=extension, kind=kind, streams=streams
    )
    (cache,) = parse_payload(data, version=3, kind=MemoryKind.ATTENTION).caches
    assert (cache.transposed, cache.extension, cache.streams) == (transposed, extension, streams)
    assert [tensor.part for tensor in cache.tensors] == ["k", "k", "v", "v"] if values else ["k", "k"]
    assert sum(cache.layer_bytes) == sum(5 * tensor.row_bytes for tensor in cache.tensors)


def test_from_version_4_on_the_rotation_of_keys_and_values_is_told() -> None:
    data = attention_cache(range(2), version=4, rotation=(64, 128))
    assert parse_payload(data, version=4).caches[0].rotation == (64, 128)
    error_of(attention_cache(range(2), version=4, rotation=(63, 0)), version=4)


def test_cells_come_in_any_order_but_no_position_twice() -> None:
    (cache,) = parse_payload(attention_cache([7, 8, 9, 4, 5, 6]), version=3).caches
    assert (cache.first_position, cache.last_position, cache.consecutive) == (4, 9, True)
    (cache,) = parse_payload(attention_cache([9, 2, 5]), version=3).caches
    assert not cache.consecutive
    assert "two cells for position 5" in str(error_of(attention_cache([4, 5, 6, 5])))
    assert "a position that cannot be" in str(error_of(attention_cache([0, -1])))


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30))
def test_a_position_that_comes_twice_is_found_wherever_it_is(positions: list[int]) -> None:
    data = attention_cache(positions, layers=1)
    if len(set(positions)) < len(positions):
        error_of(data, kind=MemoryKind.ATTENTION)
    else:
        (cache,) = parse_payload(data, version=3, kind=MemoryKind.ATTENTION).caches
        assert (cache.first_position, cache.last_position) == (min(positions), max(positions))
        assert cache.consecutive == (max(positions) - min(positions) + 1 == len(positions))


def test_thousands_of_cells_are_checked_across_blocks() -> None:
    many = [*range(2000, 5000), *range(2000)]
    assert parse_payload(attention_cache(many, layers=1), version=3).caches[0].consecutive
    many[-1] = 2500
    assert "two cells for position 2500" in str(error_of(attention_cache(many, layers=1)))


def test_with_pictures_several_cells_may_share_a_position() -> None:
    data = attention_cache([0, 1, 1, 1, 2], extension=12)
    assert parse_payload(data, version=3).caches[0].last_position == 2


def test_the_layers_of_the_model_must_be_met() -> None:
    data = payload(MemoryKind.HYBRID)
    assert parse_payload(data, version=3, layers=3).kind is MemoryKind.HYBRID
    assert "layers: 3 is not 4" in str(error_of(data, layers=4, kind=MemoryKind.HYBRID))
    assert "layers: 2 is not 1" in str(error_of(data, layers=1, kind=MemoryKind.HYBRID))


def test_two_cells_of_a_recurrent_memory_are_refused_because_the_library_would_abort() -> None:
    data = bytearray(recurrent_cache(2))
    data[0] = 2
    assert "cells: 2" in str(error_of(bytes(data), kind=MemoryKind.RECURRENT))


@pytest.mark.parametrize(
    ("at", "value", "reason"),
    [
        (0, 257, "streams"),
        (0, 0, "streams"),
        (4, 2**31, "cells"),
        (12, 2, "another number of sequences"),
        (16, 256, "sequence id"),
        (44, 2, "transposition"),
        (48, 0, "layers"),
        (48, 513, "layers"),
        (52, 4, "unknown tensor type 4"),
        (56, 3, "rows of 3 bytes of f16"),
        (56, 0, "rows of 0 bytes"),
        (60, 2**31, "rows of"),
    ],
)
def test_each_field_is_checked_and_named(at: int, value: int, reason: str) -> None:
    data = bytearray(attention_cache(range(3)))
    data[at : at + 4] = struct.pack("<I", value)
    error = error_of(bytes(data), kind=MemoryKind.ATTENTION)
    assert reason in error.message
    assert error.offset <= at


def test_the_size_of_all_is_limited() -> None:
    error_of(attention_cache(range(9), row=1 << 10), limits=Limits(state_bytes=1 << 12))
    error_of(attention_cache(range(9)), limits=Limits(tokens=8))
    error_of(attention_cache([0, 2, 4, 6]), limits=Limits(position_runs=3))


@pytest.mark.parametrize("kind", MemoryKind)
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("follows", [b"", SCKP, b"NEW!", struct.pack("<I", 0xDEADBEEF)])
def test_the_end_is_found_however_the_bytes_are_cut(kind: MemoryKind, known: bool, follows: bytes) -> None:
    data = payload(kind)
    stream = memoryview(data + follows + b"more" * 30 if follows else data)
    for step in (1, 3, 4, 7, 50, len(stream)):
        walker = PayloadWalker(version=3, kind=kind if known else None)
        for start in range(0, len(stream), step):
            walker.feed(stream[start : start + step])
        summary = walker.finish()
        assert (summary.kind, summary.bytes) == (kind, len(data))
        assert walker.follows == follows


@pytest.mark.parametrize("kind", MemoryKind)
def test_what_follows_must_begin_a_section(kind: MemoryKind) -> None:
    for follows in (b"\1\0\0\0", b"\0\0\0\0rest", b"\1\0\1\0", b"abc"):
        with pytest.raises(PayloadError):
            walk(payload(kind) + follows, kind)


@pytest.mark.parametrize("kind", MemoryKind)
def test_a_state_that_is_cut_off_is_not_taken_for_one_that_is_whole(kind: MemoryKind) -> None:
    data = payload(kind)
    for end in range(len(data)):
        try:
            summary = parse_payload(data[:end], version=3, kind=kind)
        except PayloadError:
            continue
        # Nothing tells keys alone from keys and values, or two recurrent layers from one; the shape does.
        assert summary.shape != parse_payload(data, version=3, kind=kind).shape


def test_no_claim_takes_memory_or_time() -> None:
    huge = attention_cache(range(1))[:8] + struct.pack("<iIi", 0, 1, 0) + struct.pack("<IIiQ", 0, 512, F16, 1 << 30)
    assert "ends in the middle of k rows" in str(error_of(huge, kind=MemoryKind.ATTENTION))
    assert LIMITS.layers == 512
