"""`slotwire inspect`: what it shows of an image, and what it says about a file that is none."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from service.cli import main
from service.state.memory import MemoryKind
from tests.unit.images import GOLDEN, full_image, manifest, written


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """Of all sections."""
    path = tmp_path / "slot.bin"
    path.write_bytes(written(full_image(MemoryKind.SLIDING_WINDOW)))
    return path


def shown(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["inspect", str(path)]) == 0
    output, errors = capsys.readouterr()
    assert not errors
    return output


def fields(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["inspect", "--json", str(path)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    value: dict[str, Any] = json.loads(line)
    return value


def row(output: str, name: str) -> str:
    (line,) = [line for line in output.splitlines() if line.strip().startswith(name)]
    return line


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_a_real_file_is_drawn(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = shown(path, capsys)
    assert f"state version {path.stem.partition('state')[2][0]}" in row(output, "header")
    assert "0 620 290 417" in row(output, "tokens")
    assert row(output, "tokens").rstrip().endswith("309 1050")
    assert ("plain list" in row(output, "tokens")) == ("plain" in path.stem)
    assert "41.2 KiB" in row(output, "target state")
    assert "hybrid memory" in row(output, "target state")
    assert "44 cells, positions 0 to 43, 3 layers of 11.0 KiB (k f16, v f16)" in row(output, "attention")
    assert "1 cell, position 43, 5 of 8 layers of 1.5 KiB (r f32)" in row(output, "recurrent")
    assert row(output, "target state").count("█") > row(output, "recurrent").count("█") > 0
    assert "warning" not in output
    if "sckp" in path.stem:
        assert "17 tokens, position 16: target 7.6 KiB" in row(output, "0 ")
        assert ("draft 1.6 KiB" in row(output, "0 ")) == ("draft" in path.stem)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_a_real_file_is_told_to_programs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = fields(path, capsys)
    assert (found["bytes"], found["tokens"]["count"]) == (path.stat().st_size, 44)
    assert found["tokens"]["ids"][:3] == [0, 620, 290]
    assert found["target"]["kind"] == "hybrid"
    assert [cache["layer_bytes"] for cache in found["target"]["caches"]] == [[11264] * 3, [1536] * 5]
    assert len(found["checkpoints"]) == ("sckp" in path.stem)
    assert (found["draft"], found["manifest"], found["unread_bytes"], found["warnings"]) == (None, None, 0, [])


def test_every_section_is_drawn(image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = shown(image, capsys)
    assert "sliding window memory" in row(output, "target state")
    assert "2 tokens, positions 0 to 1: target" in row(output, "1 ")
    assert "attention memory" in row(output, "draft")
    assert "tiny hybrid" in row(output, "manifest")
    assert "2026-09-21T14:13:20+00:00" in row(output, "created")
    assert "architecture lfm2" in row(output, "fingerprint")
    assert "warning" not in output
    found = fields(image, capsys)
    assert found["draft"]["speculative"] == {"bytes": 7}
    assert found["checkpoints"][1]["draft"]["kind"] == "recurrent"
    assert found["manifest"] == json.loads(manifest().encode())


def test_what_was_not_read_is_a_warning(image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = image.read_bytes()
    image.write_bytes(data[:-1])
    output = shown(image, capsys)
    assert "warning: manifest dropped: it ends in the middle of the manifest" in output
    assert "damaged" in row(output, "not read")

    image.write_bytes(data + b"NEW!" + bytes(96))
    assert "unknown section b'NEW!'" in shown(image, capsys)
    assert fields(image, capsys)["unread_bytes"] == 100

    image.write_bytes(written(dataclasses.replace(full_image(), manifest=manifest(tokens=9))))
    assert fields(image, capsys)["warnings"] == ["3 tokens, but the manifest says 9"]


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_manifest_cannot_command_the_terminal(
    encoding: str, image: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    image.write_bytes(written(dataclasses.replace(full_image(), manifest=manifest(model="a\x1b[31m [bold]é[/]\nb"))))
    monkeypatch.setattr("rich.console.Console.encoding", encoding)
    output = shown(image, capsys)
    assert "\x1b" not in output
    assert "[31m [bold]" in row(output, "manifest")
    assert output.isascii() == (encoding == "ascii")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("missing", None, "cannot read .*: No such file or directory"),
        ("folder/", None, "cannot read .*: Is a directory"),
        ("empty", b"", "it ends in the middle of the header"),
        ("model", b"GGUF" + bytes(100), "it is no slot image"),
        ("cut", written(full_image())[:100], "target state: ends in the middle of"),
    ],
)
@pytest.mark.parametrize("option", [[], ["--json"]])
def test_a_file_that_is_no_image_is_one_line_and_exit_code_1(
    name: str,
    content: bytes | None,
    reason: str,
    option: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / name
    if name.endswith("/"):
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    assert main(["inspect", *option, str(path)]) == 1
    output, errors = capsys.readouterr()
    assert not output
    (line,) = errors.splitlines()
    assert line.startswith("slotwire: ")
    assert str(path) in line
    assert reason.split(".*")[-1] in line


def test_a_pipe_can_be_inspected(capsys: pytest.CaptureFixture[str]) -> None:
    read, write = os.pipe()
    try:
        os.write(write, written(full_image()))
        os.close(write)
        assert "hybrid memory" in shown(Path(f"/dev/fd/{read}"), capsys)
    finally:
        os.close(read)
