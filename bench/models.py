"""Models for benchmarks, made once from the embedded default model and kept in a cache folder."""

from __future__ import annotations

import os
from pathlib import Path

import llama_cpp

from service.config import default_model

_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7}  # llama_ftype


def cache() -> Path:
    """Where made models are kept."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "slotwire-bench"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def smollm2(kind: str) -> Path:
    """SmolLM2-135M-Instruct as `kind`, by llama.cpp's own quantize call from the embedded Q4_1 file."""
    path = cache() / f"SmolLM2-135M-Instruct.{kind}.gguf"
    if not path.exists():
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize, params.nthread = _FILE_TYPES[kind], True, 1
        making = path.with_suffix(".part")
        status = llama_cpp.llama_model_quantize(str(default_model().path).encode(), str(making).encode(), params)
        if status != 0:
            raise RuntimeError(f"llama_model_quantize failed with status {status}")
        making.rename(path)
    return path
