"""Turns the contract in `protos/` into the Python package `slotwire.v1`. Used by the build hook and by a test."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

_INIT = '"""Generated from protos/slotwire/v1; do not edit."""\n'


def generate(protos: Path, out: Path) -> None:
    """Writes `slotwire/v1/` (messages, stubs, types) for all of `protos/slotwire/v1` into the existing folder `out`.

    `slotwire` itself gets no `__init__.py`: it is a namespace package, so that other distributions can add to it.

    Raises:
        RuntimeError: the compiler refused the contract, with what it said.
        FileNotFoundError: `protos` has no contract.
    """
    sources = sorted(path.relative_to(protos).as_posix() for path in protos.glob("slotwire/v1/*.proto"))
    if not sources:
        raise FileNotFoundError(f"no slotwire/v1/*.proto in {protos}")
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={protos}"]
    command += [f"--plugin={name}={_plugin(name)}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
    command += [f"--{kind}_out={out}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    done = subprocess.run([*command, *sources], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"protoc failed with exit code {done.returncode}:\n{done.stderr}")
    package = out / "slotwire" / "v1"
    (package / "__init__.py").write_text(_INIT, encoding="utf-8")
    (package / "py.typed").touch()


def _plugin(name: str) -> Path:
    """The script of the mypy-protobuf that this interpreter imports; one on PATH may be of another version."""
    for file in importlib.metadata.files("mypy-protobuf") or ():
        if file.stem == name:
            return Path(str(file.locate()))
    raise FileNotFoundError(f"mypy-protobuf is installed without its script {name}")
