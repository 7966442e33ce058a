"""`slotwire inspect`."""

from __future__ import annotations

import json as json_module
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from service.cli.failure import Failure
from service.cli.output import printable, table_console, write_json
from service.state.errors import ImageError
from service.state.layout import Section
from service.state.manifest import Manifest
from service.state.memory import CacheKind, CacheSummary, PayloadSummary
from service.state.survey import BlobSurvey, CheckpointSurvey, DraftSurvey, ImageSurvey, survey
from service.state.tokens import TokenList

_CHUNK_BYTES = 1 << 20
_BAR_CELLS = 24
_SHOWN_TOKENS = 8
_HEAD_BYTES = 12


def inspect(file: Path, /, *, json: bool = False) -> int:
    """Show what is in a slot image: a file of ours or one that llama-server saved. Needs no model.

    Args:
        file: The file.
        json: Write one line of JSON instead.
    """
    try:
        found = survey(_chunks(file))
    except OSError as error:
        raise Failure(f"cannot read {file}: {error.strerror}") from None
    except ImageError as error:
        raise Failure(f"{file}: {error.message}") from None
    if json:
        write_json(_fields(file, found))
    else:
        _draw(table_console(), file, found)
    return 0


def _chunks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            yield chunk


def _warnings(found: ImageSurvey) -> list[str]:
    warnings = [f"{section.value} dropped: {reason}" for section, reason in found.dropped.items()]
    if found.unknown:
        warnings.append(f"unknown section {found.unknown!r}: it and what follows were not read")
    count = len(found.tokens)
    last = max((cache.last_position for cache in found.target.caches if cache.last_position is not None), default=-1)
    if last + 1 != count and not found.tokens.has_media:
        warnings.append(f"{count:,} tokens, but the state has {last + 1:,} positions")
    if found.manifest is not None and found.manifest.tokens != count:
        warnings.append(f"{count:,} tokens, but the manifest says {found.manifest.tokens:,}")
    return warnings


# For people


def _draw(console: Console, file: Path, found: ImageSurvey) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    rows = _Rows(table, found.size, console.encoding)
    tokens = found.tokens
    rows.add("header", _HEAD_BYTES, f"magic ggsq, state version {found.version}")
    rows.add("tokens", len(tokens.pack()), _tokens(tokens))
    rows.payload("target state", found.target.bytes, found.target)
    if found.checkpoints:
        size = found.sections[Section.CHECKPOINTS]
        rows.add("checkpoints", size, f"{len(found.checkpoints):,}: what cannot be rolled back, as it was earlier")
        for index, checkpoint in enumerate(found.checkpoints):
            rows.checkpoint(index, checkpoint)
    if found.draft is not None:
        rows.draft(found.sections[Section.DRAFT], found.draft)
    if found.manifest is not None:
        rows.add("manifest", found.sections[Section.MANIFEST], found.manifest.model)
        for name, text in _manifest_lines(found.manifest):
            rows.note(name, text)
    if found.unread:
        rows.add("not read", found.unread, "damaged, or of someone newer", style="red")
    console.print(_text(f"{file}: slot image, {_size(found.size)}", console.encoding, "bold"))
    console.print(table)
    for warning in _warnings(found):
        console.print(_text(f"warning: {warning}", console.encoding, "yellow"))


class _Rows:
    """Lines of the drawing. A bar shows which part of the `whole`, in bytes, a line is about."""

    def __init__(self, table: Table, whole: int, encoding: str) -> None:
        self._table = table
        self._whole = whole
        self._encoding = encoding

    def add(self, name: str, size: int, text: str, *, style: str = "cyan", indent: int = 0) -> None:
        bar = Text(self._bar(size), style="dim" if indent else style)
        self._table.add_row(
            Text("  " * indent + name, style="" if indent else "bold"), _size(size), bar, _text(text, self._encoding)
        )

    def note(self, name: str, text: str) -> None:
        self._table.add_row(Text(f"  {name}"), "", "", _text(text, self._encoding))

    def payload(self, name: str, size: int, payload: PayloadSummary | None, *, indent: int = 0) -> None:
        """A state, and each cache of it."""
        self.add(name, size, f"{payload.kind.value} memory" if payload else "nothing of its own", indent=indent)
        for cache in payload.caches if payload else ():
            self.add(cache.kind.value, cache.bytes, _cache(cache), indent=indent + 1)

    def checkpoint(self, index: int, found: CheckpointSurvey) -> None:
        blobs = {"target": found.target, "draft": found.draft, "speculative": found.speculative}
        sizes = ", ".join(f"{name} {_size(blob.size)}" for name, blob in blobs.items() if blob.size)
        places = _positions(found.first_position, found.last_position)
        size = sum(blob.size for blob in blobs.values())
        self.add(str(index), size, f"{_count(found.tokens, 'token')}, {places}: {sizes or 'empty'}", indent=1)

    def draft(self, size: int, found: DraftSurvey) -> None:
        self.payload("draft", size, found.state.payload)
        if found.speculative.size:
            self.add("speculative", found.speculative.size, "what the proposer adds", indent=1)

    def _bar(self, size: int) -> str:
        eighths = round(size / self._whole * _BAR_CELLS * 8)
        if not self._encoding.startswith("utf"):
            return "#" * max(eighths // 8, 1)
        full, rest = divmod(max(eighths, 1), 8)
        return "█" * full + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[rest]


def _tokens(tokens: TokenList) -> str:
    ids = [str(token) for token in tokens.ids[:_SHOWN_TOKENS]]
    if len(tokens) > 2 * _SHOWN_TOKENS:
        ids += ["..."]
    ids += [str(token) for token in tokens.ids[_SHOWN_TOKENS:][-_SHOWN_TOKENS:]]
    form = "" if tokens.packed else ", plain list of an older server"
    return f"{len(tokens):,}{form}{', with media' if tokens.has_media else ''}: {' '.join(ids)}"


def _cache(cache: CacheSummary) -> str:
    if not cache.cells:
        return "no cells"
    places = _positions(cache.first_position, cache.last_position)
    layers, sizes = len(cache.layer_bytes), sorted(set(cache.layer_bytes))
    of = f" of {cache.layers}" if cache.kind is CacheKind.RECURRENT else ""
    span = " to ".join(_size(size) for size in (sizes if len(sizes) < 2 else (sizes[0], sizes[-1])))
    kinds = dict.fromkeys(f"{tensor.part} {tensor.type}" for tensor in cache.tensors if tensor.row_bytes)
    notes = [
        _count(cache.cells, "cell"),
        places + ("" if cache.consecutive else " with gaps"),
        f"{layers}{of} layers of {span} ({', '.join(kinds)})",
    ]
    notes += ["values transposed"] if cache.transposed else []
    notes += [f"{cache.streams} streams"] if cache.streams > 1 else []
    notes += [f"{cache.extension} bytes more a cell"] if cache.extension else []
    notes += (
        [f"rotated by {cache.rotation[0]} and {cache.rotation[1]}"] if cache.rotation and any(cache.rotation) else []
    )
    return ", ".join(notes)


def _manifest_lines(manifest: Manifest) -> Iterator[tuple[str, str]]:
    yield "created", _time(manifest.created)
    yield (
        "tokens",
        f"{manifest.tokens:,}"
        + ("" if manifest.pending_token is None else f", and token {manifest.pending_token} pending"),
    )
    for name in ("fingerprint", "sampling", "speculation", "digests", "extra"):
        if value := getattr(manifest, name):
            yield name, ", ".join(f"{key} {_value(item)}" for key, item in value.items())


def _value(item: Any) -> str:
    return item if isinstance(item, str) else json_module.dumps(item, ensure_ascii=False)


def _positions(first: int | None, last: int | None) -> str:
    return f"position {first:,}" if first == last else f"positions {first:,} to {last:,}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _size(size: int) -> str:
    for unit, bytes_ in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= bytes_:
            return f"{size / bytes_:,.1f} {unit}"
    return f"{size} B"


def _text(text: str, encoding: str, style: str = "") -> Text:
    """One line, without what commands a terminal and what it cannot show; never markup."""
    line = " ".join(printable(text).split())
    return Text(line.encode(encoding, "replace").decode(encoding), style=style)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


# For programs


def _fields(file: Path, found: ImageSurvey) -> dict[str, Any]:
    return {
        "file": str(file),
        "bytes": found.size,
        "state_version": found.version,
        "tokens": {
            "count": len(found.tokens),
            "packed": found.tokens.packed,
            "media": found.tokens.has_media,
            "ids": found.tokens.ids.tolist(),
        },
        "target": _blob_fields(BlobSurvey(found.target.bytes, found.target)),
        "checkpoints": [
            {
                "tokens": checkpoint.tokens,
                "first_position": checkpoint.first_position,
                "last_position": checkpoint.last_position,
                "target": _blob_fields(checkpoint.target),
                "draft": _blob_fields(checkpoint.draft),
                "speculative": _blob_fields(checkpoint.speculative),
            }
            for checkpoint in found.checkpoints
        ],
        "draft": None
        if found.draft is None
        else {"state": _blob_fields(found.draft.state), "speculative": _blob_fields(found.draft.speculative)},
        "manifest": None if found.manifest is None else json_module.loads(found.manifest.encode()),
        "unread_bytes": found.unread,
        "warnings": _warnings(found),
    }


def _payload_fields(payload: PayloadSummary | None) -> dict[str, Any]:
    if payload is None:
        return {}
    caches = [asdict(cache) | {"layer_bytes": cache.layer_bytes} for cache in payload.caches]
    return {"kind": payload.kind, "caches": caches}


def _blob_fields(blob: BlobSurvey) -> dict[str, Any]:
    return {"bytes": blob.size} | _payload_fields(blob.payload)
