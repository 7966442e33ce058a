"""Deterministic decodes: what is decoded together, where the cells of a text stand, and that its bits stay."""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Iterator
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.engine.batch import DecodeStatus, Segment
from service.engine.llama import LlamaRunner, load_runner
from service.engine.llama.cells import Cells
from service.engine.llama.invariant import parts
from service.engine.settings import ContextSettings, ModelSettings
from tests import random_models
from tests.conftest import TINY

MICRO_BATCH = 32
SLOTS = 4


@contextlib.contextmanager
def loaded(model: Path, **context: object) -> Iterator[LlamaRunner]:
    fields = {"context": 512, "slots": SLOTS, "threads": 1, "deterministic": True} | context
    runner = load_runner(model, ModelSettings(), ContextSettings(**fields))  # type: ignore[arg-type]
    try:
        yield runner
    finally:
        runner.close()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    return random_models.quantized(random_models.llama(folder / "llama.gguf"), folder / "llama.Q8_0.gguf")


lengths = st.lists(st.integers(1, 100), min_size=1, max_size=20)


@given(lengths, st.integers(1, 17))
def test_recurrent_parts_leave_no_row_alone(rows: list[int], outputs: int) -> None:
    segments = [Segment(slot, list(range(count)), 0, min(outputs, count)) for slot, count in enumerate(rows)]
    found = parts(segments, MICRO_BATCH, recurrent=True)
    for part in found:
        sizes = {len(segment.tokens) for segment in part.segments}
        assert len(sizes) == 1
        (size,) = sizes
        assert len(part.segments) > 1 or size == 1 or size % MICRO_BATCH != 1
        assert len(part.segments) * 2 <= MICRO_BATCH  # two rows of each fit a micro-batch
    decoded = [(segment, place) for part in found for segment, place in zip(part.segments, part.places, strict=True)]
    for original in segments:
        pieces = [segment for segment, _ in decoded if segment.slot == original.slot]
        assert [token for piece in pieces for token in piece.tokens] == original.tokens
        assert [piece.start for piece in pieces] == [0, len(pieces[0].tokens)][: len(pieces)]
        assert sum(piece.outputs for piece in pieces) == original.outputs
    places = sorted(place for segment, place in decoded if segment.outputs)
    assert places == np.cumsum([0, *(segment.outputs for segment in segments)])[:-1].tolist()


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12), st.booleans()), max_size=60))
def test_cells_stay_in_the_order_of_tokens(moves: list[tuple[int, int, bool]]) -> None:
    """Sequences grow, shrink and go in any order; with plugs and moves each keeps its cells in order."""
    cells, scratch = Cells(), 9
    for sequence, count, shrink in moves:
        if shrink:
            cells.drop(sequence, max(0, len(cells.of(sequence)) - count))
            continue
        segments = [Segment(sequence, [0] * count, len(cells.of(sequence)), 1)]
        for slot in cells.misplaced(segments, room=100):
            length = len(cells.of(slot))
            cells.drop(slot, 0)
            cells.place(slot, length)
        arranged = cells.arrange(segments)
        for segment, plugs in zip(arranged.segments, arranged.plugs, strict=True):
            cells.place(scratch, plugs)
            cells.place(segment.slot, len(segment.tokens))
        cells.drop(scratch, 0)
        held = [cell for slot in range(6) for cell in cells.of(slot)]
        assert len(held) == len(set(held))
        for slot in range(6):
            assert list(cells.of(slot)) == sorted(cells.of(slot))


def positions(runner: LlamaRunner, sequence: int) -> list[int]:
    """Of the tokens of a sequence of a plain attention cache, in the order of their cells."""
    context = runner._context.handle
    size = llama_cpp.llama_state_seq_get_size_ext(context, sequence, 0)
    data = (ctypes.c_uint8 * size)()
    llama_cpp.llama_state_seq_get_data_ext(context, data, size, sequence, 0)
    raw = bytes(data)
    streams, count = struct.unpack_from("<II", raw, 8)
    assert streams == 1
    entry = struct.Struct("<iIi")  # position, number of sequences, the sequence
    return [entry.unpack_from(raw, 16 + index * entry.size)[0] for index in range(count)]


def test_the_cells_of_the_real_cache_stay_in_order(llama: Path) -> None:
    """Slots come, go, draft and take back; the copy of the cells is right if none ever gets out of order."""
    dice = np.random.default_rng(3)
    with loaded(llama) as runner:
        held = [0] * SLOTS
        for _ in range(300):
            chosen = [slot for slot in range(SLOTS) if dice.random() < 0.6]
            segments = [
                Segment(slot, dice.integers(2, 2000, int(dice.integers(1, 6))).tolist(), held[slot], 1)
                for slot in chosen
            ]
            if segments and sum(held) < 400:
                assert runner.decode(segments) is DecodeStatus.OK
                for segment in segments:
                    held[segment.slot] += len(segment.tokens)
            for slot in chosen:
                if dice.random() < 0.5:
                    held[slot] = runner.keep(slot, max(0, held[slot] - int(dice.integers(0, 4))))
            if dice.random() < 0.05 or sum(held) >= 400:
                slot = int(dice.integers(SLOTS))
                held[slot] = runner.keep(slot, 0)
            for slot in range(SLOTS):
                if held[slot]:
                    assert positions(runner, slot) == list(range(held[slot]))


def test_a_full_batch_has_room_beside_holes(llama: Path) -> None:
    """Rows that fill holes come on top of those that were planned, and more than a batch holds end every request."""
    with loaded(llama, batch=64) as runner:
        assert runner.decode([Segment(0, [5] * 4, 0), Segment(1, [6] * 4, 0)]) is DecodeStatus.OK
        runner.keep(0, 0)  # four holes before the cells of slot 1
        assert runner.decode([Segment(1, [7] * 64, 4, 1)]) is DecodeStatus.OK
        assert positions(runner, 1) == list(range(68))


@pytest.mark.parametrize("kind", ["llama", "hybrid"])
def test_bits_do_not_depend_on_who_came_and_went(llama: Path, kind: str) -> None:
    tokens = np.random.default_rng(1).integers(2, 2000, 60).tolist()
    with loaded(llama if kind == "llama" else TINY) as runner:

        def scores(company: bool) -> list[bytes]:
            found = []
            for slot in range(SLOTS):
                runner.keep(slot, 0)
            for place, token in enumerate(tokens):
                segments = [Segment(1, [token], place, 1)]
                if company:
                    other = place % 3 * 2 % 4
                    start = runner._context.memory.length(other)
                    segments.insert(place % 2, Segment(other, [5] * (1 + place % 7), start, 1))
                assert runner.decode(segments) is DecodeStatus.OK
                index = next(i for i, segment in enumerate(segments) if segment.slot == 1)
                found.append(runner.logits(index).tobytes())
                if company and place % 5 == 4:
                    runner.keep(place % 3 * 2 % 4, 0)
            return found

        assert scores(company=True) == scores(company=False)


def test_a_model_that_cannot_promise_says_so(tmp_path: Path) -> None:
    plain = random_models.llama(tmp_path / "f32.gguf")
    with loaded(plain) as runner:  # F32 matrices of this size take another path for few rows
        assert not runner.info.capabilities.deterministic
    window = random_models.quantized(random_models.sliding_window(tmp_path / "s.gguf"), tmp_path / "s.Q8_0.gguf")
    with loaded(window) as runner:
        assert not runner.info.capabilities.deterministic
    with loaded(window, slots=1) as runner:
        assert runner.info.capabilities.deterministic


@pytest.mark.parametrize("threads", [1, 2])
def test_a_model_that_can_promise_says_so(llama: Path, threads: int) -> None:
    for model in (llama, TINY):
        with loaded(model, threads=threads) as runner:
            assert runner.info.capabilities.deterministic
    with loaded(TINY, deterministic=False) as runner:
        assert not runner.info.capabilities.deterministic
