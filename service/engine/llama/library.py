"""The library itself: where its log lines go, and what it says about itself."""

from __future__ import annotations

import collections
import ctypes
import logging

import llama_cpp

log = logging.getLogger("slotwire.llama")

RUNTIME_VERSION: str = llama_cpp.__version__

STATE_VERSION: int = llama_cpp.LLAMA_STATE_SEQ_VERSION

_WARN, _ERROR = 3, 4  # ggml_log_level

_recent: collections.deque[str] = collections.deque(maxlen=8)
"""The newest complaints (warnings and errors), which explain why a call returned nothing."""


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _on_log(level: int, text: bytes, _user_data: ctypes.c_void_p) -> None:
    line = text.decode("utf-8", "replace").rstrip()
    if not line.strip("."):  # progress dots and empty continuations
        return
    if level in (_WARN, _ERROR):
        _recent.append(line)
    log.log(logging.INFO if level == _ERROR else logging.DEBUG, "%s", line)


def route_log() -> None:
    """Send llama.cpp's log lines to the logger `slotwire.llama`: its errors as infos, all else for debugging.

    They are a page per load; what matters to an operator is raised as an error with the text of `last_complaint`.
    """
    llama_cpp.llama_log_set(_on_log, ctypes.c_void_p(0))


def clear_complaints() -> None:
    _recent.clear()


def last_complaint(default: str) -> str:
    """The newest error lines of the library, without its function names, or `default`."""
    lines = [line.split(": ", 1)[-1] for line in _recent]
    return "; ".join(dict.fromkeys(lines)) or default


def system_info() -> str:
    """The features that the library was compiled with, as llama.cpp words them."""
    info: bytes = llama_cpp.llama_print_system_info()
    return info.decode("utf-8", "replace").strip()


def supports_gpu_offload() -> bool:
    return bool(llama_cpp.llama_supports_gpu_offload())
