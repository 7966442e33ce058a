"""The payloads that this version of llama.cpp writes, for every kind of memory, parse to what was put into them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import llama_cpp
import pytest

from service.engine.batch import DecodeStatus, Segment
from service.engine.llama.context import Context
from service.engine.llama.model import Model
from service.engine.settings import ContextSettings, ModelSettings
from service.state.layout import BLOB_MAGIC, BLOB_PREFIX, TENSOR_TYPES
from service.state.memory import CacheKind, MemoryKind
from service.state.payload import parse_payload
from tests import random_models
from tests.conftest import TINY

VERSION = llama_cpp.LLAMA_STATE_SEQ_VERSION
PARTIAL_ONLY = 1
WINDOW = 32  # of the sliding-window model


def hybrid(_: Path) -> Path:
    return TINY


KINDS: dict[MemoryKind, Callable[[Path], Path]] = {
    MemoryKind.ATTENTION: random_models.llama,
    MemoryKind.RECURRENT: random_models.mamba2,
    MemoryKind.HYBRID: hybrid,
    MemoryKind.SLIDING_WINDOW: random_models.sliding_window,
}


@contextmanager
def context_of(path: Path, **settings: object) -> Iterator[Context]:
    model = Model(path, ModelSettings())
    options = {"context": 512, "slots": 2, "threads": 1, "ubatch": 32, "batch": 64} | settings
    context = Context(model, ContextSettings(**options))  # type: ignore[arg-type]
    try:
        yield context
    finally:
        context.close()
        model.close()


def decode(context: Context, sequence: int, start: int, count: int) -> None:
    for first in range(start, start + count, 32):
        tokens = [100 + place % 300 for place in range(first, min(first + 32, start + count))]
        assert context.decode([Segment(sequence, tokens, first, outputs=0)]) is DecodeStatus.OK


def state(context: Context, sequence: int, flags: int = 0) -> bytes:
    size = llama_cpp.llama_state_seq_get_size_ext(context.handle, sequence, flags)
    buffer = (ctypes.c_uint8 * size)()
    assert llama_cpp.llama_state_seq_get_data_ext(context.handle, buffer, size, sequence, flags) == size
    data = bytes(buffer)
    assert data[:4] == BLOB_MAGIC.to_bytes(4, "little")
    return data[BLOB_PREFIX:]


@pytest.mark.parametrize("flash_attention", ["on", "off"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_payload_tells_what_the_sequence_had(kind: MemoryKind, flash_attention: str, tmp_path: Path) -> None:
    with context_of(KINDS[kind](tmp_path / "model.gguf"), flash_attention=flash_attention) as context:
        decode(context, 0, 0, 50)
        decode(context, 1, 0, 40)
        decode(context, 0, 50, 20)
        whole, partial, empty = state(context, 0), state(context, 0, PARTIAL_ONLY), state(context, 2)

    summary = parse_payload(whole, version=VERSION, kind=kind)
    assert parse_payload(whole, version=VERSION) == summary
    assert [cache.kind for cache in summary.caches] == list(kind.caches)
    full, *rest = summary.caches
    for cache in summary.caches:
        assert (cache.last_position, cache.consecutive) == (69, True)
        if cache.kind is CacheKind.ATTENTION:
            assert cache.transposed == (flash_attention == "off")
            assert cache.cells == (WINDOW if cache in rest else 70)
    assert (full.first_position, full.cells) == ((69, 1) if kind is MemoryKind.RECURRENT else (0, 70))

    assert [cache.kind for cache in parse_payload(partial, version=VERSION, kind=kind, partial=True).caches] == list(
        kind.partial
    )
    assert all(cache.cells == 0 for cache in parse_payload(empty, version=VERSION, kind=kind).caches)


def test_quantized_caches_parse() -> None:
    with context_of(TINY, cache_type_k="q8_0", cache_type_v="q4_0", flash_attention="on") as context:
        decode(context, 0, 0, 10)
        summary = parse_payload(state(context, 0), version=VERSION, kind=MemoryKind.HYBRID)
    assert {tensor.type for tensor in summary.caches[0].tensors} == {"q8_0", "q4_0"}


def test_cells_that_were_used_again_hold_positions_in_another_order(tmp_path: Path) -> None:
    with context_of(random_models.llama(tmp_path / "model.gguf"), context=256) as context:
        decode(context, 0, 0, 100)
        decode(context, 1, 0, 150)
        context.keep(0, 0)
        decode(context, 1, 150, 60)
        data = state(context, 1)
    (cache,) = parse_payload(data, version=VERSION, kind=MemoryKind.ATTENTION).caches
    assert (cache.cells, cache.first_position, cache.last_position, cache.consecutive) == (210, 0, 209, True)
    positions = [int.from_bytes(data[at : at + 4], "little") for at in range(8, 8 + 12 * 210, 12)]
    assert positions != sorted(positions)


def test_the_types_of_tensors_are_the_librarys() -> None:
    library = ctypes.CDLL(str(next(Path(llama_cpp.__file__).parent.glob("lib/libggml-base*"))))
    library.ggml_type_name.restype = ctypes.c_char_p
    library.ggml_type_size.restype = ctypes.c_size_t
    library.ggml_blck_size.restype = ctypes.c_int64
    for number, kind in TENSOR_TYPES.items():
        found = library.ggml_type_name(number), library.ggml_blck_size(number), library.ggml_type_size(number)
        assert found == (kind.name.encode(), kind.block, kind.bytes)
