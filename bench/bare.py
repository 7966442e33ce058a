"""The peer of the engine benchmark: a bare loop around `llama_decode`, greedy, on one thread, with nothing else.

    python -m bench.bare --model FILE --streams 4 --tokens 128

reads prompts (a JSON list of token lists) from standard input and prints one JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from pathlib import Path

import llama_cpp
import numpy as np

from service.engine.batch import Segment
from service.engine.llama import library
from service.engine.llama.context import Context
from service.engine.llama.model import Model
from service.engine.settings import ContextSettings, ModelSettings


def generate(context: Context, prompts: list[list[int]], count: int) -> float:
    """Seconds for `count` decodes of one row for each prompt, after the prompts were decoded."""
    streams = len(prompts)
    vocabulary = context.logits(0).shape[0]
    last = np.empty(streams, np.int32)
    for index, prompt in enumerate(prompts):
        context.keep(index, 0)
        context.decode([Segment(index, prompt, 0, outputs=1)])
        last[index] = context.logits(0).argmax()
    batch = context.batch
    batch.fill([Segment(i, last[i : i + 1], len(prompts[i]), outputs=1) for i in range(streams)], streams)
    began = time.perf_counter()
    for _ in range(count):
        batch.tokens[:streams] = last
        if llama_cpp.llama_decode(context.handle, batch.struct) != 0:
            raise RuntimeError("llama_decode failed")
        floats = llama_cpp.llama_get_logits(context.handle)
        address = ctypes.cast(floats, ctypes.c_void_p).value
        array = (ctypes.c_float * (streams * vocabulary)).from_address(address or 0)
        last = np.frombuffer(array, np.float32).reshape(streams, vocabulary).argmax(axis=1)
        batch.positions[:streams] += 1
    return time.perf_counter() - began


def prefill(context: Context, prompt: list[int]) -> float:
    """Seconds to decode a prompt in chunks of the largest size, into an empty cache."""
    for sequence in range(context.scratch):
        context.keep(sequence, 0)
    began = time.perf_counter()
    for start in range(0, len(prompt), context.max_rows):
        chunk = prompt[start : start + context.max_rows]
        context.decode([Segment(0, chunk, start, outputs=int(start + len(chunk) == len(prompt)))])
    context.logits(0).argmax()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    library.route_log()
    settings = ContextSettings(slots=options.slots, context=options.context, threads=options.threads)
    context = Context(Model(options.model, ModelSettings()), settings)
    for line in sys.stdin:  # one job a line, so that all jobs run on the same warm context
        job = json.loads(line)
        if job["kind"] == "generate":
            seconds = generate(context, job["prompts"], job["tokens"])
        else:
            seconds = prefill(context, job["prompts"][0])
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
