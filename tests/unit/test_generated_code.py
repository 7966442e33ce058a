"""The generated package that is installed is the one that `protos/` makes now."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_installed_code_is_what_the_contract_generates(tmp_path: Path) -> None:
    codegen = runpy.run_path(str(ROOT / "clients" / "python" / "codegen.py"))
    codegen["generate"](ROOT / "protos", tmp_path)
    installed = importlib.util.find_spec("slotwire.v1")
    assert installed is not None
    assert installed.origin is not None

    fresh = _contents(tmp_path / "slotwire" / "v1")

    assert "generation_pb2.pyi" in fresh
    assert _contents(Path(installed.origin).parent) == fresh, "run: pip install -e clients/python"


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
