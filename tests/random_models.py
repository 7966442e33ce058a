"""Small language models with random weights, one for each kind of memory that llama.cpp keeps.

Each function writes a GGUF file in well under a second and returns its path. The same seed gives the same file. All
share the vocabulary of `tests/models/tiny-hybrid.Q8_0.gguf` and a context of 2,048 tokens. Their greedy text means
nothing, but it varies, depends on what the memory holds, and never ends: control tokens get logits near 0.

How rows are grouped into decodes changes logits (of standard deviation 4) by up to 0.1, which turns about one greedy
token in 250. With `EXACT` settings it is less than 0.001: use them where texts must agree.

Sources: `src/models/{llama,cohere2,mamba2}.cpp` of llama.cpp, which name the tensors and keys of each architecture.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import numpy.typing as npt

VOCABULARY_OF = Path(__file__).parent / "models" / "tiny-hybrid.Q8_0.gguf"
CONTEXT = 2048
EXACT: dict[str, Any] = {"cache_type_k": "f32", "cache_type_v": "f32", "flash_attention": "off"}
"""Fields of ContextSettings. Flash attention alone makes f16 of a cache in f32."""

_WIDTH = 64
_LAYERS = 4
_HEADS = 4
_HEAD_WIDTH = _WIDTH // _HEADS
_INNER = 2 * _WIDTH
_FOCUS = 2.0
"""Gain of queries and keys: attention looks at a few tokens instead of averaging all, so that history matters."""
_SPREAD = 4.0
"""Standard deviation of the logits: sampled text differs from greedy text, but its likeliest tokens stand out."""

Array = npt.NDArray[Any]
Tensors = dict[str, Array]
"""By GGUF name, in numpy's order: a matrix has the shape [outputs, inputs]. uint8 holds blocks of Q8_0."""
Keys = dict[str, Any]
"""Of the GGUF header, without the architecture's name in front."""


def llama(path: Path, *, seed: int = 1) -> Path:
    """Plain attention: the end of a slot can be dropped anywhere. 4 layers, 2 key heads for 4 query heads."""
    dice = np.random.default_rng(seed)
    tensors = _embeddings(dice)
    for layer in range(_LAYERS):
        tensors |= _attention(dice, layer, _WIDTH, _WIDTH // 2) | _feed_forward(dice, layer)
        tensors[f"blk.{layer}.ffn_norm.weight"] = _ones(_WIDTH)
    return _write(path, "llama", _attention_keys(_HEADS, _HEADS // 2, _HEAD_WIDTH), tensors)


def sliding_window(path: Path, *, window: int = 32, seed: int = 1) -> Path:
    """Layers 0 and 2 see the last `window` tokens alone, layers 1 and 3 see all (cohere2).

    What is outside the window is lost when llama.cpp needs the room, not before. For these layers it has room for
    `window * (slots + 1) + ubatch` tokens, rounded up to a multiple of 256, of all slots together.
    """
    dice = np.random.default_rng(seed)
    tensors = _embeddings(dice)
    # one matrix embeds and predicts; a small one, lest each token predict itself
    tensors["token_embd.weight"] = tensors.pop("output.weight") / 10
    for layer in range(_LAYERS):
        tensors |= _attention(dice, layer, _WIDTH, _WIDTH // 2) | _feed_forward(dice, layer)
    keys = _attention_keys(_HEADS, _HEADS // 2, _HEAD_WIDTH) | {
        "attention.layer_norm_epsilon": 1e-5,
        "attention.sliding_window": window,
        "attention.sliding_window_pattern": 2,
        "logit_scale": 10.0,
    }
    return _write(path, "cohere2", keys, tensors)


def mamba2(path: Path, *, seed: int = 1) -> Path:
    """Purely recurrent: a slot is one state of fixed size, which knows no way back."""
    state, heads, kernel = 16, 8, 4
    mixed = _INNER + 2 * state
    dice = np.random.default_rng(seed)
    tensors = _embeddings(dice)
    for layer in range(_LAYERS):
        tensors |= {
            f"blk.{layer}.attn_norm.weight": _ones(_WIDTH),
            f"blk.{layer}.ssm_in.weight": _matrix(dice, _INNER + mixed + heads, _WIDTH),
            f"blk.{layer}.ssm_conv1d.weight": _matrix(dice, mixed, kernel),
            f"blk.{layer}.ssm_conv1d.bias": np.zeros(mixed, np.float32),
            f"blk.{layer}.ssm_dt.bias": dice.uniform(-7, -1, heads).astype(np.float32),
            f"blk.{layer}.ssm_a": -dice.uniform(0.1, 1, (heads, 1)).astype(np.float32),  # decay: always negative
            f"blk.{layer}.ssm_d": np.ones((heads, 1), np.float32),
            f"blk.{layer}.ssm_norm.weight": np.ones((1, _INNER), np.float32),
            f"blk.{layer}.ssm_out.weight": _matrix(dice, _WIDTH, _INNER),
        }
    keys = {
        "ssm.conv_kernel": kernel,
        "ssm.inner_size": _INNER,
        "ssm.state_size": state,
        "ssm.time_step_rank": heads,
        "ssm.group_count": 1,
    }
    return _write(path, "mamba2", keys, tensors)


def wide(path: Path, *, kv_bytes_per_token: int = 1 << 20, seed: int = 1) -> Path:
    """Plain attention whose cache takes `kv_bytes_per_token` (a multiple of 2,048, with f16 keys and values).

    The file has 34 times as many bytes: one layer of width 32 in Q8_0. llama.cpp allocates and clears the cache of the
    whole context, so give it a small one. A token of 1 MiB takes about 30 ms.
    """
    width, head_width, f16, keys_and_values = 32, 512, 2, 2
    heads, rest = divmod(kv_bytes_per_token, head_width * f16 * keys_and_values)
    if rest or not heads:
        raise ValueError(f"{kv_bytes_per_token} is not a positive multiple of 2048")
    dice = np.random.default_rng(seed)
    tensors = _embeddings(dice, width) | _attention(dice, 0, heads * head_width, heads * head_width, width, q8=True)
    tensors |= _feed_forward(dice, 0, width) | {"blk.0.ffn_norm.weight": _ones(width)}
    return _write(path, "llama", _attention_keys(heads, heads, head_width, width, layers=1), tensors)


def draft_of(source: Path, path: Path, *, noise: float, seed: int = 1) -> Path:
    """The model of `source` (any but `wide`) with gaussian noise on each weight, `noise` times the weight itself.

    After the same tokens its greedy choice is that of `llama` in about 94, 82, 69, 37, 18 and 0 % of all cases for a
    noise of 0.003, 0.01, 0.02, 0.05, 0.1 and 1.
    """
    reader = gguf.GGUFReader(source)
    dice = np.random.default_rng(seed)
    tensors: Tensors = {}
    for tensor in reader.tensors:
        if tensor.tensor_type != gguf.GGMLQuantizationType.F32:
            raise ValueError(f"{source}: {tensor.name} is {tensor.tensor_type.name}, not F32")
        factors = 1 + noise * dice.standard_normal(tensor.data.shape, np.float32)
        tensors[tensor.name] = tensor.data * factors.astype(np.float32)
    writer = gguf.GGUFWriter(path, reader.get_field("general.architecture").contents())
    for field in reader.fields.values():
        _copy(field, writer)
    return _finish(writer, tensors)


def _embeddings(dice: np.random.Generator, width: int = _WIDTH) -> Tensors:
    """What stands before and after the layers."""
    output = _matrix(dice, len(_control_tokens()), width, _SPREAD)
    output[_control_tokens()] /= 10
    return {
        "token_embd.weight": dice.standard_normal((len(output), width), np.float32),
        "output_norm.weight": _ones(width),
        "output.weight": output,
    }


def _attention(
    dice: np.random.Generator, layer: int, queries: int, keys: int, width: int = _WIDTH, *, q8: bool = False
) -> Tensors:
    """One attention block, whose queries and keys have that many numbers in all heads together."""
    make = _q8_matrix if q8 else _matrix
    return {
        f"blk.{layer}.attn_norm.weight": _ones(width),
        f"blk.{layer}.attn_q.weight": make(dice, queries, width, _FOCUS),
        f"blk.{layer}.attn_k.weight": make(dice, keys, width, _FOCUS),
        f"blk.{layer}.attn_v.weight": make(dice, keys, width),
        f"blk.{layer}.attn_output.weight": make(dice, width, queries),
    }


def _attention_keys(heads: int, key_heads: int, head_width: int, width: int = _WIDTH, layers: int = _LAYERS) -> Keys:
    return {
        "embedding_length": width,
        "block_count": layers,
        "feed_forward_length": 2 * width,
        "attention.head_count": heads,
        "attention.head_count_kv": key_heads,
        "attention.key_length": head_width,
        "attention.value_length": head_width,
        "rope.dimension_count": head_width,
        "rope.freq_base": 10000.0,
    }


def _feed_forward(dice: np.random.Generator, layer: int, width: int = _WIDTH) -> Tensors:
    return {
        f"blk.{layer}.ffn_gate.weight": _matrix(dice, 2 * width, width),
        f"blk.{layer}.ffn_up.weight": _matrix(dice, 2 * width, width),
        f"blk.{layer}.ffn_down.weight": _matrix(dice, width, 2 * width),
    }


def _matrix(dice: np.random.Generator, outputs: int, inputs: int, gain: float = 1.0) -> Array:
    """Makes vectors of root mean square `gain` from ones of 1."""
    numbers = dice.standard_normal((outputs, inputs), np.float32)
    return numbers * np.float32(gain / inputs**0.5)


def _q8_matrix(dice: np.random.Generator, outputs: int, inputs: int, gain: float = 1.0) -> Array:
    """The same in Q8_0, evenly distributed: blocks of 32 bytes with a scale of two bytes before them."""
    deviation = 256 / 12**0.5  # of an even distribution over all bytes
    blocks = np.empty((outputs, inputs // 32, 34), np.uint8)
    blocks[..., :2] = np.array([gain / inputs**0.5 / deviation], np.float16).view(np.uint8)
    blocks[..., 2:] = dice.integers(0, 256, (outputs, inputs // 32, 32), np.uint8)
    return blocks.reshape(outputs, -1)


def _ones(width: int) -> Array:
    return np.ones(width, np.float32)


@functools.cache
def _tokenizer() -> tuple[gguf.ReaderField, ...]:
    """The header fields of the vocabulary."""
    fields = gguf.GGUFReader(VOCABULARY_OF).fields
    return tuple(field for name, field in fields.items() if name.startswith("tokenizer."))


@functools.cache
def _control_tokens() -> npt.NDArray[np.bool_]:
    """For each token, whether it is one."""
    types = next(field for field in _tokenizer() if field.name == "tokenizer.ggml.token_type")
    is_control: npt.NDArray[np.bool_] = np.array(types.contents()) == gguf.TokenType.CONTROL
    return is_control


def _write(path: Path, architecture: str, keys: Keys, tensors: Tensors) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    common = {
        "vocab_size": len(_control_tokens()),
        "context_length": CONTEXT,
        "embedding_length": _WIDTH,
        "block_count": _LAYERS,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    for name, value in (common | keys).items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{architecture}.{name}", value)
    for field in _tokenizer():
        _copy(field, writer)
    return _finish(writer, tensors)


def _copy(field: gguf.ReaderField, writer: gguf.GGUFWriter) -> None:
    """Copy a header field, except for those that each writer adds itself."""
    if not field.name.startswith("GGUF.") and field.name != "general.architecture":
        element = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, field.contents(), field.types[0], element)


def _finish(writer: gguf.GGUFWriter, tensors: Tensors) -> Path:
    for name, tensor in tensors.items():
        q8 = gguf.GGMLQuantizationType.Q8_0 if tensor.dtype == np.uint8 else None
        writer.add_tensor(name, tensor, raw_dtype=q8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(writer.path)


def quantized(source: Path, path: Path) -> Path:
    """The model of `source` with weights in Q8_0, by llama.cpp's own call: in deterministic mode it keeps its bits,
    which F32 matrices of this size do not.
    """
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.pure = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, 1, True
    if llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), params) != 0:
        raise RuntimeError(f"{source} could not be quantized")
    return path
