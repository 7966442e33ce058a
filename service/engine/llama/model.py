"""Loading a GGUF file: weights, adapters, and the facts about them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp

from service.engine.gguf import check_gguf
from service.engine.llama import library
from service.engine.settings import ModelSettings
from service.errors import ConfigError

_SPLIT_MODES = {"none": 0, "layer": 1, "row": 2, "tensor": 3}
_OVERRIDE_TAGS = {
    "int": llama_cpp.LLAMA_KV_OVERRIDE_TYPE_INT,
    "float": llama_cpp.LLAMA_KV_OVERRIDE_TYPE_FLOAT,
    "bool": llama_cpp.LLAMA_KV_OVERRIDE_TYPE_BOOL,
    "str": llama_cpp.LLAMA_KV_OVERRIDE_TYPE_STR,
}
_OVERRIDE_BYTES = 127  # of a key and of a string value, in llama.h's struct

OnProgress = Callable[[float], bool]
"""Called with the share that is loaded, in [0, 1]; returning False gives up."""


class Model:
    """Weights in memory. Made, used and closed on the engine's thread.

    Source: `llama_model_load_from_file` and the `llama_model_*` getters of llama.h.
    """

    def __init__(
        self, path: Path, settings: ModelSettings, on_progress: OnProgress | None = None, *, field: str = "model"
    ) -> None:
        """`field` is the setting that named the file. Raises ConfigError."""
        check_gguf(field, path)
        self.path = path
        library.clear_complaints()
        with _Params(settings, on_progress) as params:
            self.handle = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self.handle:
            why = library.last_complaint("llama.cpp gave no reason")
            raise ConfigError(f"{field}: cannot load {path}: {why}", reason="MODEL_UNUSABLE")
        self.on_gpu = library.supports_gpu_offload() and settings.gpu_layers != 0
        self.vocab_handle = llama_cpp.llama_model_get_vocab(self.handle)
        self._adapters: list[tuple[Any, float]] = []
        try:
            if not llama_cpp.llama_model_has_decoder(self.handle) or llama_cpp.llama_model_has_encoder(self.handle):
                raise ConfigError(f"{field}: {path} is no decoder-only language model", reason="MODEL_KIND")
            self._adapters = [self._load_adapter(spec) for spec in settings.lora]
        except BaseException:
            self.close()
            raise

    def _load_adapter(self, spec: str) -> tuple[Any, float]:
        name, colon, scale = spec.rpartition(":")
        try:
            file, factor = (name, float(scale)) if colon else (spec, 1.0)
        except ValueError:
            file, factor = spec, 1.0
        check_gguf("lora", Path(file))
        library.clear_complaints()
        adapter = llama_cpp.llama_adapter_lora_init(self.handle, file.encode())
        if not adapter:
            why = library.last_complaint("llama.cpp gave no reason")
            raise ConfigError(f"lora: cannot load {file}: {why}", reason="ADAPTER_UNUSABLE")
        return adapter, factor

    def apply_adapters(self, context: Any) -> None:
        """Switch the loaded LoRA adapters on for `context` (a `llama_context` pointer)."""
        if not self._adapters:
            return
        count = len(self._adapters)
        handles = (llama_cpp.llama_adapter_lora_p_ctypes * count)(*(handle for handle, _ in self._adapters))
        scales = (ctypes.c_float * count)(*(scale for _, scale in self._adapters))
        if llama_cpp.llama_set_adapters_lora(context, handles, count, scales) != 0:
            raise ConfigError("lora: the adapters do not fit the model", reason="ADAPTER_UNUSABLE")

    def close(self) -> None:
        if self.handle:
            llama_cpp.llama_model_free(self.handle)  # frees its adapters, too
            self.handle = None

    def text(self, getter: Callable[..., int], *arguments: Any) -> str:
        """A string from one of the library's getters that fill a buffer; empty where there is none."""
        buffer = ctypes.create_string_buffer(1024)
        length = getter(self.handle, *arguments, buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace") if length > 0 else ""

    def metadata(self, key: str) -> str:
        """A scalar of the GGUF header, as text; empty where there is none."""
        return self.text(llama_cpp.llama_model_meta_val_str, key.encode())

    @property
    def description(self) -> str:
        return self.text(llama_cpp.llama_model_desc)

    @property
    def chat_template(self) -> str | None:
        template: bytes | None = llama_cpp.llama_model_chat_template(self.handle, None)
        return template.decode("utf-8", "replace") if template else None


class _Params:
    """`llama_model_params` and the buffers they point to, kept alive while the library reads them."""

    def __init__(self, settings: ModelSettings, on_progress: OnProgress | None) -> None:
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = settings.gpu_layers
        params.split_mode = _SPLIT_MODES[settings.split_mode]
        params.main_gpu = settings.main_gpu
        params.load_mode = int(settings.mmap) | int(settings.mlock) << 1  # 0 none, 1 mmap, 2 mlock, 3 both
        params.check_tensors = settings.check_tensors
        if settings.tensor_split:
            shares = (ctypes.c_float * llama_cpp.llama_max_devices())()
            if len(settings.tensor_split) > len(shares):
                raise ConfigError(
                    f"tensor_split: {len(settings.tensor_split)} shares, but this build knows {len(shares)} devices"
                )
            shares[: len(settings.tensor_split)] = settings.tensor_split
            self._shares = shares
            params.tensor_split = shares
        if settings.override_kv:
            self._overrides = _overrides(settings.override_kv)
            params.kv_overrides = self._overrides
        if on_progress is not None:
            self._callback = llama_cpp.llama_progress_callback(lambda share, _data: on_progress(share))
            params.progress_callback = self._callback
        self._params = params

    def __enter__(self) -> Any:
        return self._params

    def __exit__(self, *_: object) -> None:
        """Nothing to undo: the buffers go with this object."""


def _overrides(specs: tuple[str, ...]) -> Any:
    """The array of `llama_model_kv_override` for KEY=TYPE:VALUE texts, ended by an empty key."""
    array = (llama_cpp.llama_model_kv_override * (len(specs) + 1))()
    for entry, spec in zip(array, specs, strict=False):
        key, _, typed = spec.partition("=")
        kind, colon, value = typed.partition(":")
        if not key or not colon or kind not in _OVERRIDE_TAGS:
            raise ConfigError(f"override_kv: {spec!r} is not KEY=TYPE:VALUE with TYPE int, float, bool or str")
        if max(len(key.encode()), len(value.encode())) > _OVERRIDE_BYTES:
            raise ConfigError(f"override_kv: {spec!r}: key and value have at most {_OVERRIDE_BYTES} bytes")
        entry.tag, entry.key = _OVERRIDE_TAGS[kind], key.encode()
        try:
            if kind == "int":
                entry.value.val_i64 = int(value)
            elif kind == "float":
                entry.value.val_f64 = float(value)
            elif kind == "bool":
                entry.value.val_bool = {"true": True, "false": False}[value]
            else:
                entry.value.val_str = value.encode()
        except (ValueError, KeyError):
            raise ConfigError(f"override_kv: {spec!r}: {value!r} is no {kind}") from None
    return array
