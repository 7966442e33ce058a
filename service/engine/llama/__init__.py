"""llama.cpp behind the engine's own words. The only package that imports `llama_cpp`."""

from service.engine.llama.library import RUNTIME_VERSION, STATE_VERSION, system_info
from service.engine.llama.runner import LlamaRunner, load_runner

__all__ = ["RUNTIME_VERSION", "STATE_VERSION", "LlamaRunner", "load_runner", "system_info"]
