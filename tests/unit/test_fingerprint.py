"""Fingerprints: what differs has a name, what is newer is let be, and a file's content counts, not its name."""

from __future__ import annotations

import dataclasses
import json
import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import ConfigError
from service.state.errors import ManifestError
from service.state.fingerprint import Fingerprint, Lora, Rope, differences, vocabulary_digest
from service.state.integrity import digest_of
from service.state.manifest import Manifest, decode
from service.state.weights import HashingCancelled, parts, weights_digest
from tests.unit.images import manifest

OURS = Fingerprint(
    architecture="lfm2",
    weights=digest_of([b"weights"]),
    vocabulary=digest_of([b"vocabulary"]),
    cache_type_k="f16",
    cache_type_v="q8_0",
    flash_attention=True,
    state_version=3,
    loras=(Lora(digest_of([b"b"]), 0.5), Lora(digest_of([b"a"]), 1.0)),
    rope=Rope(scaling="yarn", frequency_base=10000.0),
)
CHANGES: dict[str, Any] = {
    "architecture": "llama",
    "weights": digest_of([b"other"]),
    "vocabulary": digest_of([b"other"]),
    "cache_type_k": "q8_0",
    "cache_type_v": "f16",
    "flash_attention": False,
    "state_version": 4,
    "loras": (Lora(digest_of([b"a"]), 1.0),),
}
NUMBERS = st.none() | st.floats(-1e6, 1e6)
TEXT = st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=20)
FINGERPRINTS = st.builds(
    Fingerprint,
    architecture=TEXT,
    weights=TEXT,
    vocabulary=TEXT,
    cache_type_k=TEXT,
    cache_type_v=TEXT,
    flash_attention=st.booleans(),
    state_version=st.integers(0, 100),
    loras=st.lists(st.builds(Lora, TEXT, st.floats(-10, 10)), max_size=3).map(tuple),
    rope=st.builds(
        Rope, st.none() | TEXT, *[NUMBERS] * 6, st.none() | st.integers(0, 1 << 20),
    ),
)  # fmt: skip


def through_a_manifest(value: dict[str, Any]) -> dict[str, Any]:
    return dict(decode(Manifest(fingerprint=value, model="m", tokens=1, created=1.0).encode()).fingerprint)


# Comparing


@given(FINGERPRINTS)
def test_a_fingerprint_survives_a_manifest(fingerprint: Fingerprint) -> None:
    assert Fingerprint.of(through_a_manifest(fingerprint.mapping())) == fingerprint


@given(FINGERPRINTS, FINGERPRINTS)
def test_fingerprints_without_differences_are_the_equal_ones(ours: Fingerprint, theirs: Fingerprint) -> None:
    assert (differences(ours, theirs) == []) == (ours == theirs)
    mirrored = [(name, theirs, ours) for name, ours, theirs in differences(ours, theirs)]
    assert mirrored == differences(theirs, ours)


def test_every_field_of_a_fingerprint_is_compared() -> None:
    assert CHANGES.keys() | {"rope"} == {item.name for item in dataclasses.fields(Fingerprint)}
    for name, value in CHANGES.items():
        (difference,) = differences(OURS, dataclasses.replace(OURS, **{name: value}))
        assert difference.field == name
    for item in dataclasses.fields(Rope):
        changed = dataclasses.replace(OURS.rope, **{item.name: 77})
        (difference,) = differences(OURS, dataclasses.replace(OURS, rope=changed))
        assert difference.field == f"rope.{item.name}"


def test_a_difference_reads_as_a_message() -> None:
    theirs = dataclasses.replace(
        OURS, cache_type_k="q4_0", flash_attention=False, loras=(), rope=Rope(scaling="yarn")
    )  # fmt: skip
    assert [str(difference) for difference in differences(OURS, theirs)] == [
        "cache_type_k is f16 here and q4_0 there",
        "flash_attention is on here and off there",
        f"loras is {OURS.loras[0].digest} x {OURS.loras[0].scale:g}, "
        f"{OURS.loras[1].digest} x {OURS.loras[1].scale:g} here and none there",
        "rope.frequency_base is 10000.0 here and the model's own there",
    ]


def test_the_order_of_adapters_does_not_count_and_their_scale_does() -> None:
    first, second = OURS.loras
    assert dataclasses.replace(OURS, loras=(second, first)) == OURS
    assert dataclasses.replace(OURS, loras=(first, second)) == OURS
    halved = dataclasses.replace(second, scale=second.scale / 2)
    assert differences(OURS, dataclasses.replace(OURS, loras=(first, halved)))


def test_keys_of_someone_newer_are_not_compared() -> None:
    value = OURS.mapping()
    newer = {
        **value,
        "attention_sinks": 4,
        "rope": {**value["rope"], "dimensions": [1, 2]},
        "loras": [{**lora, "layers": 3} for lora in value["loras"]],
    }
    assert differences(OURS, Fingerprint.of(through_a_manifest(newer))) == []


def test_adapters_and_rope_may_be_missing() -> None:
    value = {key: item for key, item in OURS.mapping().items() if key not in ("loras", "rope")}
    assert Fingerprint.of(value) == dataclasses.replace(OURS, loras=(), rope=Rope())


@pytest.mark.parametrize("key", sorted(CHANGES.keys() - {"loras"}))
@pytest.mark.parametrize(
    "value", [None, [], {}, 1.5, float("nan"), 10**400, -(10**400), "", "x" * 257, "a\nb", "\ud800", [True]], ids=repr
)
def test_a_value_of_another_kind_is_refused_by_the_name_of_its_key(key: str, value: object) -> None:
    with pytest.raises(ManifestError, match=key) as caught:
        Fingerprint.of({**OURS.mapping(), key: value})
    assert caught.value.reason == "BAD_FINGERPRINT"


@pytest.mark.parametrize(
    "change",
    [{"state_version": True}, {"flash_attention": 1}, {"loras": {}}, {"loras": [[]]}, {"loras": [{"digest": "a"}]},
     {"loras": [{"digest": "a", "scale": 10**400}]}, {"loras": [{"digest": "a", "scale": float("inf")}]},
     {"loras": [{"digest": 1, "scale": 1}]}, {"rope": []}, {"rope": {"scaling": 1}}, {"rope": {"frequency_base": "x"}},
     {"rope": {"yarn_original_context": 1.5}}, {"rope": {"frequency_scale": True}}],
    ids=repr,
)  # fmt: skip
def test_hostile_values_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ManifestError):
        Fingerprint.of({**OURS.mapping(), **change})


def test_a_manifest_with_less_in_its_fingerprint_is_refused_by_the_first_missing_key() -> None:
    with pytest.raises(ManifestError, match="vocabulary is missing"):
        Fingerprint.of(manifest().fingerprint)


# Vocabularies


@given(st.lists(st.tuples(st.binary(max_size=5), st.integers(0, 7)), max_size=6), st.data())
def test_vocabularies_differ_by_bytes_attributes_and_order(
    tokens: list[tuple[bytes, int]], draw: st.DataObject
) -> None:
    other = draw.draw(
        st.permutations(tokens) | st.lists(st.tuples(st.binary(max_size=5), st.integers(0, 7)), max_size=6)
    )
    assert (vocabulary_digest(iter(tokens)) == vocabulary_digest(other)) == (tokens == other)


def test_bytes_do_not_wander_between_tokens() -> None:
    assert vocabulary_digest([(b"ab", 1), (b"", 1)]) != vocabulary_digest([(b"a", 1), (b"b", 1)])
    for length in (0, 1):
        inside = b"a" + struct.pack("<II", length, 1) + b"b"
        assert vocabulary_digest([(inside, 1)]) != vocabulary_digest([(b"a", 1), (b"b", 1)])


def test_a_vocabulary_is_hashed_as_lengths_attributes_and_bytes() -> None:
    tokens = [(f"token {index}".encode(), index % 7) for index in range(20_000)]
    expected = digest_of(struct.pack("<II", len(data), attributes) + data for data, attributes in tokens)
    assert vocabulary_digest(iter(tokens)) == expected


# Weights


def digest_later(path: Path, **options: Any) -> str:
    """The digest as if the file had not been written just now."""
    return weights_digest(path, clock=lambda: time.time_ns() + 60_000_000_000, **options)


class Reads:
    """Says after each piece whether to go on, and counts the pieces."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.pieces = 0
        self._stop_after = stop_after

    def __call__(self) -> bool:
        self.pieces += 1
        return self.pieces == self._stop_after


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(range(256)) * 10_000)
    return path


def test_a_digest_is_of_the_content_alone(model: Path, tmp_path: Path) -> None:
    digest = digest_later(model)
    assert digest == digest_of([model.read_bytes()])
    other = tmp_path / "elsewhere" / "model.gguf"
    other.parent.mkdir()
    changed = bytearray(model.read_bytes())
    other.write_bytes(changed)
    assert digest_later(other) == digest
    changed[-1] ^= 1
    other.write_bytes(changed)
    assert digest_later(other) != digest


def test_a_file_is_read_once(model: Path, tmp_path: Path) -> None:
    first, second = Reads(), Reads()
    cache = tmp_path / "not yet" / "there"
    digest = digest_later(model, cache=cache, cancelled=first)
    assert first.pieces == 3
    link = tmp_path / "link.gguf"
    link.symlink_to(model)
    assert digest_later(link, cache=cache, cancelled=second) == digest
    assert second.pieces == 0
    assert [path.name for path in cache.iterdir()] == ["weights.json"]


def rewritten(path: Path) -> None:
    """Other content, and the size and time of before."""
    status, data = path.stat(), bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)
    while path.stat().st_ctime_ns == status.st_ctime_ns:  # for clocks that tick slowly
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def replaced(path: Path) -> None:
    """By another file with the size and time of before."""
    status, data = path.stat(), bytearray(path.read_bytes())
    data[1000] ^= 1
    new = path.with_suffix(".new")
    new.write_bytes(data)
    os.utime(new, ns=(status.st_atime_ns, status.st_mtime_ns))
    new.replace(path)


def longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


@pytest.mark.parametrize("change", [rewritten, replaced, longer])
def test_a_changed_file_is_read_again(model: Path, tmp_path: Path, change: Callable[[Path], None]) -> None:
    before = digest_later(model, cache=tmp_path)
    change(model)
    after = digest_later(model, cache=tmp_path)
    assert after == digest_of([model.read_bytes()]) != before
    again = Reads()
    assert digest_later(model, cache=tmp_path, cancelled=again) == after
    assert again.pieces == 0


def test_a_file_that_was_just_written_is_read_again_as_it_may_change_within_one_tick(
    model: Path, tmp_path: Path
) -> None:
    for age, remembered in ((2_000_000_000, False), (2_000_000_001, True)):
        now = max(model.stat().st_mtime_ns, model.stat().st_ctime_ns) + age
        weights_digest(model, cache=tmp_path / str(age), clock=lambda now=now: now)  # type: ignore[misc]
        assert (tmp_path / str(age)).exists() == remembered


def test_a_file_that_changes_while_it_is_read_has_no_digest(model: Path, tmp_path: Path) -> None:
    reads = 0

    def change_it() -> bool:
        nonlocal reads
        reads += 1
        longer(model)
        return reads > 10  # of 3 pieces: ends the test where it would go on for ever

    with pytest.raises(ConfigError, match=r"model\.gguf changed") as caught:
        digest_later(model, cache=tmp_path / "cache", cancelled=change_it)
    assert caught.value.reason == "MODEL_CHANGED"
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("stop_after", [1, 2, 3])
def test_hashing_stops_after_the_piece_at_hand(model: Path, tmp_path: Path, stop_after: int) -> None:
    reads = Reads(stop_after)
    with pytest.raises(HashingCancelled):
        digest_later(model, cache=tmp_path / "cache", cancelled=reads)
    assert reads.pieces == stop_after
    assert not (tmp_path / "cache").exists()


def test_an_event_cancels_from_another_thread(model: Path) -> None:
    event = threading.Event()
    event.set()
    with pytest.raises(HashingCancelled):
        digest_later(model, cancelled=event.is_set)


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        digest_later(tmp_path / "none.gguf", cache=tmp_path)


# Several files


@pytest.fixture
def split(tmp_path: Path) -> list[Path]:
    paths = parts(tmp_path / "big-00001-of-00003.gguf")
    for index, path in enumerate(paths):
        path.write_bytes(bytes([index]) * 1000)
    return paths


def test_all_parts_of_a_model_count(split: list[Path], tmp_path: Path) -> None:
    assert [path.name for path in split] == [f"big-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    digest = digest_later(split[0], cache=tmp_path)
    assert digest_later(split[2], cache=tmp_path) == digest
    assert digest != digest_of(path.read_bytes() for path in split[:1])
    for path in split:
        before = path.read_bytes()
        path.write_bytes(b"x" + before[1:])
        assert digest_later(split[0]) != digest
        path.write_bytes(before)
    assert digest_later(split[0], cache=tmp_path) == digest
    split[1].unlink()
    with pytest.raises(FileNotFoundError):
        digest_later(split[0], cache=tmp_path)


def test_parts_that_change_places_are_another_model(split: list[Path]) -> None:
    digest = digest_later(split[0])
    first, second = split[0].read_bytes(), split[1].read_bytes()
    split[0].write_bytes(second)
    split[1].write_bytes(first)
    assert digest_later(split[0]) != digest


@pytest.mark.parametrize(
    "name", ["m.gguf", "m-00004-of-00003.gguf", "m-00000-of-00003.gguf", "m-1-of-3.gguf", "m-00001-of-00003.bin"]
)
def test_a_name_of_no_part_is_a_model_of_its_own(name: str) -> None:
    assert parts(Path(name)) == [Path(name)]


# What is remembered


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[]", b"null", b'{"format": 1}', b'{"format": 1, "files": []}',
     b'{"format": 2, "files": {}}',
     b"[" * 100_000, b'{"format": 1, "files": {"PATH": 7}}', b'{"format": 1, "files": {"PATH": {"digest": 7}}}',
     b'{"format": 1, "files": {"PATH": {"digest": "DIGEST"}}}', b"9" * 10_000],
    ids=lambda content: content[:60].decode(errors="replace"),
)  # fmt: skip
def test_a_damaged_cache_is_written_anew(model: Path, tmp_path: Path, content: bytes) -> None:
    lie = digest_of([b"a lie"])
    file = tmp_path / "weights.json"
    file.write_bytes(content.replace(b"PATH", str(model).encode()).replace(b"DIGEST", lie.encode()))
    digest = digest_later(model, cache=tmp_path)
    assert digest == digest_of([model.read_bytes()])
    again = Reads()
    assert digest_later(model, cache=tmp_path, cancelled=again) == digest
    assert again.pieces == 0


@pytest.mark.parametrize("digest", ["sha256:" + "0" * 64, "blake3:" + "0" * 63, "0" * 64, "", None, 5])
def test_a_remembered_digest_that_is_none_is_not_believed(model: Path, tmp_path: Path, digest: object) -> None:
    right = digest_later(model, cache=tmp_path)
    file = tmp_path / "weights.json"
    value = json.loads(file.read_bytes())
    value["files"][str(model)]["digest"] = digest
    file.write_text(json.dumps(value))
    assert digest_later(model, cache=tmp_path) == right


def test_a_directory_that_cannot_be_written_does_no_harm(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for cache in (model, model / "below a file", tmp_path / ("x" * 300)):
        assert digest_later(model, cache=cache) == digest_of([model.read_bytes()])
        assert "model.gguf" in caplog.text
        caplog.clear()


def test_a_write_that_fails_leaves_the_old_file_and_no_other(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest_later(model, cache=tmp_path / "cache")
    before = (tmp_path / "cache" / "weights.json").read_bytes()
    longer(model)

    def refuse(*_: object) -> None:
        raise PermissionError("no")

    monkeypatch.setattr(os, "replace", refuse)
    assert digest_later(model, cache=tmp_path / "cache") == digest_of([model.read_bytes()])
    assert [path.read_bytes() for path in (tmp_path / "cache").iterdir()] == [before]


def test_the_newest_entries_are_kept(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    paths = [tmp_path / f"{index}.gguf" for index in range(70)]
    for path in paths:
        path.write_bytes(path.name.encode())
        digest_later(path, cache=cache)
    longer(paths[6])
    digest_later(paths[6], cache=cache)
    files = json.loads((cache / "weights.json").read_bytes())["files"]
    assert list(files) == [str(path) for path in (*paths[7:], paths[6])]


def test_a_name_that_is_no_utf_8_is_remembered(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/model\xff.gguf"))
    path.write_bytes(b"weights")
    digest = digest_later(path, cache=tmp_path)
    again = Reads()
    assert digest_later(path, cache=tmp_path, cancelled=again) == digest == digest_of([b"weights"])
    assert again.pieces == 0


def test_processes_at_once_leave_a_whole_file(tmp_path: Path) -> None:
    """Threads stand for processes: they share nothing but the files."""
    paths = [tmp_path / f"{index}.gguf" for index in range(8)]
    for path in paths:
        path.write_bytes(path.name.encode())
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for path in paths:
                assert digest_later(path, cache=tmp_path / "cache") == digest_of([path.name.encode()])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["weights.json"]
    assert json.loads((tmp_path / "cache" / "weights.json").read_bytes())["format"] == 1
