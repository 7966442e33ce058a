"""The llama-server of the wheel xllamacpp, as a program: `peer.py MODEL FOLDER [exact] [swa_full]`.

It writes its address on a line of its own, keeps slot files in FOLDER, and ends when its standard input does: nothing
outlives the tests, however they end.
"""

from __future__ import annotations

import sys

import xllamacpp  # type: ignore[import-untyped]


def main(model: str, folder: str, *options: str) -> None:
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_gpu_layers = 0
    params.fit_params = False  # it would choose a context by the memory that is free
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.n_threads_http = 2
    params.n_parallel, params.n_ctx, params.kv_unified = 2, 2048, True
    params.n_ubatch = 32
    params.slot_save_path = f"{folder}/"
    params.cache_ram_mib = 0  # a second memory of prompts: what is reused shall be what was restored
    params.ui = False
    params.swa_full = "swa_full" in options
    if "exact" in options:  # as `random_models.EXACT`
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()
    del server  # stops it


if __name__ == "__main__":
    main(*sys.argv[1:])
