#!/usr/bin/env python3
"""Writes random-weight GGUF models of real dimensions: for measuring speed and memory, never for what they say.

Owns the shapes, which tensor gets which type, and the stand-in vocabulary. Knows nothing of how a block looks (synth_blocks) nor of how a
model runs. To add a shape of a known family add a line to SHAPES; to add a family, write a function that lists its tensors and keys.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "py"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import synth_deepseek  # noqa: E402
import synth_gemma4  # noqa: E402
import synth_moe  # noqa: E402
from bw24.errors import Bw24Error  # noqa: E402
from bw24.gguf import GGUFWriter, open_gguf  # noqa: E402
from bw24.gguf_types import KIND_NAMES, TYPE_IDS, TYPES  # noqa: E402
from bw24.gguf_writer import atomic_file  # noqa: E402
from synth_blocks import MAKERS, nvfp4_scale, pool  # noqa: E402

FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q4_K": 14, "Q4_K_M": 15, "Q5_K": 16, "Q6_K": 18,
              "IQ4_NL": 25, "IQ4_XS": 30, "BF16": 32, "MXFP4": 38, "NVFP4": 39}  # informative key general.file_type
FALLBACK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}  # for rows that are no multiple of 256
BYTE_TOKENS = 256
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NORMAL, CONTROL, UNUSED = 1, 3, 5  # tokenizer.ggml.token_type


@dataclass(frozen=True)
class Shape:
    """Dimensions of one model, in the project's words. `extra` holds what only one family knows."""

    family: str
    vocab: int
    dim: int
    layers: int
    ff: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    context: int = 40960
    theta: float = 1e6
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Tensor:
    """A tensor to write: shape in file order. role: linear, embed or head (quantised), else a recipe of `vector`. block: layer or -1."""

    name: str
    shape: tuple[int, ...]
    role: str = "linear"
    block: int = -1


def _moe(experts: int, top: int, expert_ff: int, dense: int = 0, shared: int = 0, skew: float = 0.25, **more: int) -> dict[str, Any]:
    return {"experts": experts, "top": top, "expert_ff": expert_ff, "dense": dense, "shared": shared, "skew": skew, **more}


def _gdn(dim_state: int, k_heads: int, v_heads: int) -> dict[str, int]:
    return {"state": dim_state, "k_heads": k_heads, "v_heads": v_heads, "interval": 4, "rotary": 64}


def _gemma4(window: int, full_kv_heads: int, shared_kv: int = 0, per_layer: int = 0, experts: int = 0) -> dict[str, Any]:
    return {"window": window, "full_kv_heads": full_kv_heads, "shared_kv": shared_kv, "per_layer": per_layer, "experts": experts, "top": 8,
            "expert_ff": 704}


SHAPES: dict[str, Shape] = {
    "tiny": Shape("qwen3", 512, 256, 2, 512, 4, 2, 64, tied=False, context=2048),
    "smollm2-135m": Shape("llama", 49152, 576, 30, 1536, 9, 3, 64, tied=True, context=8192, theta=1e5),
    "qwen3-0.6b": Shape("qwen3", 151936, 1024, 28, 3072, 16, 8, 128, tied=True),
    "qwen3-0.8b": Shape("qwen3", 151936, 1024, 28, 3072, 16, 8, 128, tied=False),
    "qwen3-1.7b": Shape("qwen3", 151936, 2048, 28, 6144, 16, 8, 128, tied=True),
    "qwen3-4b": Shape("qwen3", 151936, 2560, 36, 9728, 32, 8, 128, tied=True),
    "qwen3-8b": Shape("qwen3", 151936, 4096, 36, 12288, 32, 8, 128, tied=False),
    "qwen3-14b": Shape("qwen3", 151936, 5120, 40, 17408, 40, 8, 128, tied=False),
    "qwen3-32b": Shape("qwen3", 151936, 5120, 64, 25600, 64, 8, 128, tied=False),
    "qwen2-0.5b": Shape("qwen2", 151936, 896, 24, 4864, 14, 2, 64, tied=True, context=32768),
    "llama-8b": Shape("llama", 128256, 4096, 32, 14336, 32, 8, 128, tied=False, context=8192, theta=5e5),
    "gemma3-270m": Shape("gemma3", 262144, 640, 18, 2048, 4, 1, 256, tied=True, context=32768, extra={"window": 512}),
    "gemma3-1b": Shape("gemma3", 262144, 1152, 26, 6912, 4, 1, 256, tied=True, context=32768, extra={"window": 512}),
    "qwen3.5-0.8b": Shape("qwen35", 248320, 1024, 24, 3584, 8, 2, 256, tied=True, context=262144, theta=1e7, extra=_gdn(128, 16, 16)),
    "qwen3.5-4b": Shape("qwen35", 248320, 2560, 32, 9216, 16, 4, 256, tied=True, context=262144, theta=1e7, extra=_gdn(128, 16, 32)),
    "qwen3.5-9b": Shape("qwen35", 248320, 4096, 32, 12288, 16, 4, 256, tied=False, context=262144, theta=1e7, extra=_gdn(128, 16, 32)),
    "qwen3.6-27b": Shape("qwen35", 248320, 5120, 64, 17408, 24, 4, 256, tied=False, context=262144, theta=1e7, extra=_gdn(128, 16, 48)),
    "qwen3.5-moe-mini": Shape("qwen35moe", 32768, 1024, 12, 512, 8, 2, 256, tied=False, context=262144, theta=1e7,
                              extra={**_gdn(128, 16, 32), **_moe(64, 8, 512, shared=1)}),
    "qwen3.6-35b-a3b": Shape("qwen35moe", 248320, 2048, 40, 512, 16, 2, 256, tied=False, context=262144, theta=1e7,
                             extra={**_gdn(128, 16, 32), **_moe(256, 8, 512, shared=1)}),
    "gemma4-26b-a4b": Shape("gemma4", 262144, 2816, 30, 2112, 16, 8, 256, tied=True, context=262144, extra=_gemma4(1024, 2, experts=128)),
    "gemma4-31b": Shape("gemma4", 262144, 5376, 60, 21504, 32, 16, 256, tied=True, context=262144, extra=_gemma4(1024, 4)),
    "gemma4-e4b": Shape("gemma4", 262144, 2560, 42, 10240, 8, 2, 256, tied=True, context=131072, extra=_gemma4(512, 2, 18, 256)),
    "hy3": Shape("hy_v3", 120832, 4096, 80, 13312, 64, 8, 128, tied=False, context=262144, theta=11158840.0, extra=_moe(192, 8, 1536, 1, 1)),
    "hy3-mini": Shape("hy_v3", 8192, 1024, 13, 2048, 16, 4, 128, tied=False, context=8192, theta=11158840.0, extra=_moe(192, 8, 512, 1, 1)),
    "minimax-m2": Shape("minimax-m2", 200064, 3072, 62, 1536, 48, 8, 128, tied=False, context=196608, theta=5e6,
                        extra=_moe(256, 8, 1536, rotary=64)),
    "deepseek-v2-lite": Shape("deepseek2", 102400, 2048, 27, 10944, 16, 1, 192, tied=False, context=163840, theta=1e4,
                              extra=synth_deepseek.extra(128, 64, 128, 512, 0, False, **_moe(64, 6, 1408, 1, 2))),
    "deepseek-v3": Shape("deepseek2", 129280, 7168, 61, 18432, 128, 1, 192, tied=False, context=163840, theta=1e4,
                         extra=synth_deepseek.extra(128, 64, 128, 512, 1536, True, **_moe(256, 8, 2048, 3, 1, groups=8, kept=4))),
    "deepseek-mini": Shape("deepseek2", 8192, 512, 4, 1024, 8, 1, 192, tied=False, context=8192, theta=1e4,
                           extra=synth_deepseek.extra(128, 64, 128, 512, 256, True, **_moe(16, 4, 256, 1, 1, groups=4, kept=2))),
}


# ---- families: tensors and keys ----


def _ends(s: Shape) -> list[Tensor]:
    ends = [Tensor("token_embd.weight", (s.dim, s.vocab), "head" if s.tied else "embed"), Tensor("output_norm.weight", (s.dim,), "norm")]
    return ends if s.tied else [*ends, Tensor("output.weight", (s.dim, s.vocab), "head")]


def _attention(s: Shape, i: int, q_rows: int = 1) -> list[Tensor]:
    """Q, K, V and output projections; q_rows = 2 where the query carries its gate."""
    q, kv, b = s.heads * s.head_dim, s.kv_heads * s.head_dim, f"blk.{i}."
    return [Tensor(b + "attn_q.weight", (s.dim, q * q_rows), block=i), Tensor(b + "attn_k.weight", (s.dim, kv), block=i),
            Tensor(b + "attn_v.weight", (s.dim, kv), block=i), Tensor(b + "attn_output.weight", (q, s.dim), block=i)]


def _head_norms(s: Shape, i: int) -> list[Tensor]:
    return [Tensor(f"blk.{i}.attn_{which}_norm.weight", (s.head_dim,), "norm", i) for which in "qk"]


def _norms(s: Shape, i: int, *names: str) -> list[Tensor]:
    return [Tensor(f"blk.{i}.{name}.weight", (s.dim,), "norm", i) for name in names]


def _mlp(s: Shape, i: int) -> list[Tensor]:
    b = f"blk.{i}.ffn_"
    return [Tensor(b + "gate.weight", (s.dim, s.ff), block=i), Tensor(b + "up.weight", (s.dim, s.ff), block=i),
            Tensor(b + "down.weight", (s.ff, s.dim), block=i)]


def _dense_layer(s: Shape, i: int) -> list[Tensor]:
    tensors = [*_norms(s, i, "attn_norm", "ffn_norm"), *_attention(s, i), *_mlp(s, i)]
    if s.family in ("qwen3", "gemma3"):
        tensors += _head_norms(s, i)
    if s.family == "gemma3":
        tensors += _norms(s, i, "post_attention_norm", "post_ffw_norm")
    if s.family == "qwen2":
        rows = {"q": s.heads * s.head_dim, "k": s.kv_heads * s.head_dim, "v": s.kv_heads * s.head_dim}
        tensors += [Tensor(f"blk.{i}.attn_{which}.bias", (n,), "bias", i) for which, n in rows.items()]
    return tensors


def _dense_keys(s: Shape) -> dict[str, Any]:
    keys: dict[str, Any] = {"rope.dimension_count": s.head_dim}
    if s.family == "gemma3":
        keys["attention.sliding_window"] = s.extra["window"]
    return keys


def _shared_gate_moe(s: Shape, i: int) -> list[Tensor]:
    """Router without a selection bias, experts, and a shared expert times the sigmoid of a scalar of the row."""
    tensors = [t for t in synth_moe.layer(s, i, Tensor, []) if t.role != synth_moe.BIAS]
    return [*tensors, Tensor(f"blk.{i}.ffn_gate_inp_shexp.weight", (s.dim,), "bias", i)]


def _qwen35_layer(s: Shape, i: int) -> list[Tensor]:
    """Every fourth layer attends with a gated query; the others keep a recurrent state."""
    tensors = [*_norms(s, i, "attn_norm", "post_attention_norm"), *(_shared_gate_moe(s, i) if s.family == "qwen35moe" else _mlp(s, i))]
    if (i + 1) % s.extra["interval"] == 0:
        return [*tensors, *_attention(s, i, 2), *_head_norms(s, i)]
    state, v_heads, b = s.extra["state"], s.extra["v_heads"], f"blk.{i}."
    inner, channels = v_heads * state, 2 * s.extra["k_heads"] * state + v_heads * state
    return [*tensors,
            Tensor(b + "attn_qkv.weight", (s.dim, channels), block=i), Tensor(b + "attn_gate.weight", (s.dim, inner), block=i),
            Tensor(b + "ssm_beta.weight", (s.dim, v_heads), block=i), Tensor(b + "ssm_alpha.weight", (s.dim, v_heads), block=i),
            Tensor(b + "ssm_conv1d.weight", (4, channels), "conv", i), Tensor(b + "ssm_dt.bias", (v_heads,), "dt", i),
            Tensor(b + "ssm_a", (v_heads,), "decay", i), Tensor(b + "ssm_norm.weight", (state,), "norm", i),
            Tensor(b + "ssm_out.weight", (inner, s.dim), block=i)]


def _qwen35_keys(s: Shape) -> dict[str, Any]:
    e = s.extra
    return {"rope.dimension_count": e["rotary"], "rope.dimension_sections": [11, 11, 10, 0], "full_attention_interval": e["interval"],
            "ssm.conv_kernel": 4, "ssm.state_size": e["state"], "ssm.group_count": e["k_heads"], "ssm.time_step_rank": e["v_heads"],
            "ssm.inner_size": e["v_heads"] * e["state"]}


def _qwen35moe_keys(s: Shape) -> dict[str, Any]:
    e = s.extra
    return {**_qwen35_keys(s), "expert_count": e["experts"], "expert_used_count": e["top"], "expert_feed_forward_length": e["expert_ff"],
            "expert_shared_feed_forward_length": e["expert_ff"]}


def _moe_layer(s: Shape, i: int) -> list[Tensor]:
    """hy_v3: q and k normed a head; minimax-m2: over the whole row."""
    norms = _head_norms(s, i)
    if s.family == "minimax-m2":
        rows = {"q": s.heads * s.head_dim, "k": s.kv_heads * s.head_dim}
        norms = [Tensor(f"blk.{i}.attn_{which}_norm.weight", (n,), "norm", i) for which, n in rows.items()]
    return synth_moe.layer(s, i, Tensor, [*_norms(s, i, "attn_norm", "ffn_norm"), *_attention(s, i), *norms])


@dataclass(frozen=True)
class Family:
    layer: Callable[[Shape, int], list[Tensor]]
    keys: Callable[[Shape], dict[str, Any]]
    pre: str  # tokenizer.ggml.pre of a synthesised vocabulary


FAMILIES = {
    "llama": Family(_dense_layer, _dense_keys, "smollm"), "qwen2": Family(_dense_layer, _dense_keys, "qwen2"),
    "qwen3": Family(_dense_layer, _dense_keys, "qwen2"), "gemma3": Family(_dense_layer, _dense_keys, "gpt-2"),
    "qwen35": Family(_qwen35_layer, _qwen35_keys, "qwen35"), "qwen35moe": Family(_qwen35_layer, _qwen35moe_keys, "qwen35"),
    "gemma4": Family(lambda s, i: synth_gemma4.layer(s, i, Tensor), synth_gemma4.keys, "gpt-2"),
    "hy_v3": Family(_moe_layer, synth_moe.keys, "qwen2"), "minimax-m2": Family(_moe_layer, synth_moe.keys, "qwen2"),
    "deepseek2": Family(lambda s, i: synth_deepseek.layer(s, i, Tensor), synth_deepseek.keys, "deepseek-llm"),
}


def tensors_of(s: Shape) -> list[Tensor]:
    """All tensors of a model, in file order."""
    layer = FAMILIES[s.family].layer
    more = synth_gemma4.ends(s, Tensor) if s.family == "gemma4" else []
    return [*_ends(s), *more, *(tensor for i in range(s.layers) for tensor in layer(s, i))]


def model_keys(s: Shape) -> dict[str, Any]:
    """The architecture's metadata, without the tokenizer's."""
    keys = {"context_length": s.context, "embedding_length": s.dim, "block_count": s.layers, "feed_forward_length": s.ff,
            "attention.head_count": s.heads, "attention.head_count_kv": s.kv_heads, "attention.key_length": s.head_dim,
            "attention.value_length": s.head_dim, "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": s.theta,
            "vocab_size": s.vocab}
    return {f"{s.family}.{key}": value for key, value in {**keys, **FAMILIES[s.family].keys(s)}.items()}


# ---- types ----


def _more(i: int, n: int) -> bool:
    """Layers that the Q4_K_M mix gives more bits: the first and last eighth and every third between."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def default_head(mix: str) -> str:
    """Type of the output matrix (or the tied embedding) where none is asked for."""
    return mix if mix in ("F32", "F16", "BF16", "Q8_0") else "Q6_K"


def type_plan(tensors: list[Tensor], mix: str, head: str | None = None, embed: str | None = None) -> dict[str, str]:
    """Tensor name -> storage type, for a single type or the mix Q4_K_M; 1-D tensors and small recurrent ones stay F32."""
    base = "Q4_K" if mix == "Q4_K_M" else mix
    values = [t.name for t in tensors if t.name.endswith(("attn_v.weight", "attn_qkv.weight"))]
    downs = [t.name for t in tensors if t.name.endswith("ffn_down.weight")]
    richer = {name for names in (values, downs) for i, name in enumerate(names) if mix == "Q4_K_M" and _more(i, len(names))}
    plan = {}
    for t in tensors:
        if t.role not in ("linear", "embed", "head"):
            plan[t.name] = "F32"
            continue
        wanted = {"linear": "Q6_K" if t.name in richer else base, "head": head or default_head(mix), "embed": embed or base}[t.role]
        if t.shape[0] % TYPES[TYPE_IDS[wanted]][1]:
            wanted = FALLBACK.get(wanted, wanted)
        plan[t.name] = "F16" if t.shape[0] % TYPES[TYPE_IDS[wanted]][1] else wanted
    return plan


# ---- data ----


def vector(t: Tensor, seed: int) -> np.ndarray:
    """A small F32 tensor: norm 1 +- 0.05; score a norm of queries that no factor follows, so that scores are of order one; bias N(0, 0.02); gate
    as a router's rows; conv N(0, 0.5); dt and decay in the range of trained recurrent layers."""
    rng = np.random.default_rng([seed, zlib.crc32(t.name.encode())])
    n = math.prod(t.shape)
    recipe = {"norm": lambda: rng.uniform(0.95, 1.05, n), "score": lambda: rng.uniform(0.95, 1.05, n) / math.sqrt(n),
              "bias": lambda: rng.normal(0, 0.02, n), "conv": lambda: rng.normal(0, 0.5, n),
              "freqs": lambda: np.where(np.arange(n) < synth_gemma4.ROTATED, 1.0, 1e30), "gate": lambda: rng.normal(0, 1 / math.sqrt(t.shape[0]), n),
              "dt": lambda: rng.uniform(-4.6, -2.2, n), "decay": lambda: -rng.uniform(0.5, 8.0, n)}
    return recipe[t.role]().astype("<f4")


@functools.lru_cache(maxsize=8)
def _pool(type_name: str, dim: int, seed: int) -> np.ndarray:
    return pool(type_name, TYPES[TYPE_IDS[type_name]][2], 1 / math.sqrt(dim), seed)


def stream(t: Tensor, type_name: str, seed: int) -> Iterator[memoryview]:
    """The tensor's bytes: the pool of its type and row length, repeated from an offset that its name picks."""
    _, block, size = TYPES[TYPE_IDS[type_name]]
    blocks = _pool(type_name, t.shape[0], seed)
    left = math.prod(t.shape) // block * size
    start = zlib.crc32(t.name.encode(), seed) % len(blocks) * size
    flat = memoryview(blocks).cast("B")
    while left:
        chunk = flat[start : start + left]
        yield chunk
        left, start = left - chunk.nbytes, 0


# ---- vocabulary ----


def byte_characters() -> list[str]:
    """The printable stand-in of each byte in byte-level BPE: itself where Latin-1 prints it, else U+0100 onwards in order."""
    printable = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255]
    rest = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(rest)) for b in range(256)]


def synthetic_vocabulary(size: int, pre: str) -> dict[str, Any]:
    """A byte-level BPE vocabulary: 256 bytes, then pairs and triples of bytes as merges, three control tokens at the end."""
    room = size - BYTE_TOKENS - len(SPECIAL)
    if room < 0:
        raise Bw24Error(f"a byte-level vocabulary needs at least {BYTE_TOKENS + len(SPECIAL)} tokens, asked for {size}")
    chars = byte_characters()
    pairs = [(a, b) for a in chars for b in chars]
    merges = pairs[:room]
    triples = ((a + b, c) for a, b in pairs for c in chars)
    merges += [next(triples) for _ in range(room - len(merges))]
    tokens = [*chars, *(left + right for left, right in merges), *SPECIAL]
    kinds = [NORMAL] * (size - len(SPECIAL)) + [CONTROL] * len(SPECIAL)
    return {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": kinds, "merges": [f"{left} {right}" for left, right in merges],
            "eos_token_id": size - 1, "bos_token_id": size - 3, "add_bos_token": False}


def add_vocabulary(writer: GGUFWriter, shape: Shape, source: Path | None) -> None:
    """Copy every tokenizer.* key of `source`, its token lists filled up to the shape's size; or synthesise one."""
    if source is None:
        for key, value in synthetic_vocabulary(shape.vocab, FAMILIES[shape.family].pre).items():
            writer.add(f"tokenizer.ggml.{key}", value, "i32" if key == "token_type" else None)
        return
    fills = {"tokens": lambda i: f"[PAD{i}]", "token_type": lambda i: UNUSED, "scores": lambda i: -1000.0}
    with open_gguf(source) as file:
        for key, value in file.metadata.items():
            if not key.startswith("tokenizer."):
                continue
            kind, element = file.kinds[key]
            fill = fills.get(key.removeprefix("tokenizer.ggml."))
            if fill is not None:
                value = [*value, *(fill(i) for i in range(len(value), shape.vocab))]
            writer.add(key, value, KIND_NAMES[kind if element is None else element])


def fit_vocabulary(shape: Shape, source: Path | None) -> Shape:
    """The shape with room for every token of `source`."""
    if source is None:
        return shape
    with open_gguf(source) as file:
        tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        raise Bw24Error(f"{source}: has no tokenizer.ggml.tokens")
    return replace(shape, vocab=max(shape.vocab, len(tokens)))


# ---- the file ----


class SideBySide(GGUFWriter):
    """The same file, its tensors written by several processes at once: one process writes 1 to 3 GB a second, whatever the disk."""

    def __init__(self, path: Path, jobs: int):
        super().__init__(path)
        self._jobs = jobs

    def write(self) -> None:
        if self._jobs == 1:
            super().write()
            return
        self._done = True
        with atomic_file(self.path) as out:
            self._write_header(out)
            out.flush()
            at, parts = out.tell(), []
            for _, nbytes, data in self._tensors.values():
                parts.append((at, data))
                at += nbytes + -nbytes % self.alignment
            os.ftruncate(out.fileno(), at)
            workers = []
            for k in range(self._jobs):
                workers.append(os.fork())
                if not workers[-1]:
                    os._exit(_fill(out.fileno(), parts[k :: self._jobs]))
            if any([os.waitpid(pid, 0)[1] for pid in workers]):
                raise Bw24Error(f"{self.path}: a process could not write its part")


def _fill(fd: int, parts: list[tuple[int, Any]]) -> int:
    """Writes tensors at their places; 0, or 1 after an error."""
    try:
        for at, data in parts:
            for chunk in data() if callable(data) else (data,):
                view = memoryview(chunk).cast("B")
                while view:
                    n = os.pwrite(fd, view, at)
                    at, view = at + n, view[n:]
    except OSError as error:
        print(f"synth_model: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def write_model(path: Path, name: str, shape: Shape, mix: str, seed: int = 0, vocab: Path | None = None, head: str | None = None,
                embed: str | None = None, jobs: int = 1) -> dict[str, int]:
    """Write one model; returns bytes by storage type. Equal arguments give equal files, however many processes write them."""
    tensors = tensors_of(shape)
    plan = type_plan(tensors, mix, head, embed)
    with SideBySide(path, jobs) as writer:
        writer.add("general.architecture", shape.family)
        writer.add("general.name", f"random weights, {name} shape")
        writer.add("general.file_type", FILE_TYPES[mix])
        writer.add("general.quantization_version", 2)
        for key, value in model_keys(shape).items():
            writer.add(key, value)
        add_vocabulary(writer, shape, vocab)
        return add_tensors(writer, shape, tensors, plan, seed)


def add_tensors(writer: GGUFWriter, shape: Shape, tensors: list[Tensor], plan: dict[str, str], seed: int) -> dict[str, int]:
    """Tensors by their plan, NVFP4 matrices with their factors; returns bytes by storage type."""
    given = {t.name for t in tensors}
    sizes: dict[str, int] = {}
    for t in tensors:
        kind = plan[t.name]
        _, block, size = TYPES[TYPE_IDS[kind]]
        sizes[kind] = sizes.get(kind, 0) + math.prod(t.shape) // block * size
        if t.role in ("linear", "embed", "head"):
            writer.add_tensor(t.name, kind, t.shape, functools.partial(stream, t, kind, seed))
        elif t.role in (synth_moe.ROUTER, synth_moe.BIAS):
            writer.add_tensor(t.name, kind, t.shape, synth_moe.vector(t, seed, shape.extra["skew"], shape.extra["top"]))
        else:
            matrix = t.name.removesuffix("scale") + "weight"  # a factor of an NVFP4 matrix brings its spread in
            spread = nvfp4_scale(1 / math.sqrt(shape.extra["expert_ff"])) if t.name.endswith("_exps.scale") and plan[matrix] == "NVFP4" else 1
            writer.add_tensor(t.name, kind, t.shape, (vector(t, seed) * spread).astype("<f4"))
        # fused gate and up experts have no factor of their own in any reader: their rows are large, and a norm follows
        factor = t.name.removesuffix("weight") + "scale" not in given and not t.name.endswith("gate_up_exps.weight")
        if kind == "NVFP4" and t.role == "linear" and factor:
            scale = np.array([nvfp4_scale(1 / math.sqrt(t.shape[0]))], "<f4")
            writer.add_tensor(t.name.removesuffix("weight") + "scale", "F32", (1,), scale)
    return sizes


EPILOG = """\
examples:
  synth_model.py --list
  synth_model.py qwen3-0.8b --type Q4_K -o q.gguf                 every linear layer Q4_K, output matrix Q6_K
  synth_model.py qwen3-8b --type Q4_K_M --vocab real.gguf -o m.gguf   the usual mix, with the vocabulary of a real model
  synth_model.py qwen3-32b --type NVFP4 --layers 8 -o cut.gguf    eight layers of the 32B shape
Values are close to N(0, 1/sqrt(row length)), so activations and logits stay of order one. The text such a model writes means nothing.
Embedding and output matrix are written in types of their own: --embed and --head set them.
"""


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    types = sorted([*MAKERS, "Q4_K_M"])
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], epilog=EPILOG, formatter_class=raw)
    parser.add_argument("shape", nargs="?", choices=sorted(SHAPES), metavar="SHAPE", help="a name from --list")
    parser.add_argument("-o", "--output", type=Path, help="the file to write")
    parser.add_argument("--type", default="Q4_K_M", choices=types, help="type of the linear layers, or the mix Q4_K_M (default)")
    parser.add_argument("--head", choices=sorted(MAKERS),
                        help="type of the output matrix or tied embedding (default: Q6_K; for float types and Q8_0 the same)")
    parser.add_argument("--embed", choices=sorted(MAKERS), help="type of an untied embedding (default: that of the linear layers)")
    parser.add_argument("--vocab", type=Path, metavar="FILE.gguf",
                        help="copy the tokenizer of this file (default: a made-up byte-level BPE)")
    parser.add_argument("--layers", type=int, help="number of layers, where it should differ from the shape's")
    parser.add_argument("--tied", action=argparse.BooleanOptionalAction, default=None, help="share embedding and output matrix, or not")
    parser.add_argument("--router-skew", type=synth_moe.skew_of, metavar="CURVE",
                        help=f"mixtures: {', '.join(synth_moe.CURVES)}, or the share of choices that falls on the most used quarter of the experts")
    parser.add_argument("--seed", type=int, default=0, help="equal seeds give equal files (default 0)")
    parser.add_argument("--jobs", type=int, default=1, help="processes that write (default 1)")
    parser.add_argument("--list", action="store_true", help="list the shapes and leave")
    args = parser.parse_args(argv)
    if not args.list and (args.shape is None or args.output is None):
        parser.error("a SHAPE and -o FILE are needed (or --list)")
    if args.layers is not None and args.layers < 1 or args.seed < 0 or args.jobs < 1:
        parser.error("--layers and --jobs need at least 1, --seed at least 0")
    return args


def list_shapes() -> None:
    print(f"{'name':<14} {'family':<7} {'params':>7} {'vocab':>7} {'dim':>5} {'layers':>6} {'ff':>6} {'heads':>9} {'head_dim':>8}  output")
    for name, s in SHAPES.items():
        params = sum(math.prod(t.shape) for t in tensors_of(s)) / 1e9
        heads = f"{s.heads}/{s.kv_heads}"
        print(f"{name:<14} {s.family:<7} {params:6.2f}B {s.vocab:7} {s.dim:5} {s.layers:6} {s.ff:6} {heads:>9} {s.head_dim:8}  "
              + ("tied" if s.tied else "own"))


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    if args.list:
        list_shapes()
        return 0
    shape = SHAPES[args.shape]
    shape = replace(shape, layers=args.layers or shape.layers, tied=shape.tied if args.tied is None else args.tied)
    if args.router_skew is not None:
        shape = replace(shape, extra={**shape.extra, "skew": args.router_skew})
    try:
        if args.router_skew is not None and "experts" not in shape.extra:
            raise Bw24Error(f"--router-skew: {args.shape} has no experts")
        shape = fit_vocabulary(shape, args.vocab)
        sizes = write_model(args.output, args.shape, shape, args.type, args.seed, args.vocab, args.head, args.embed, args.jobs)
    except (Bw24Error, OSError) as error:
        print(f"synth_model: {error}", file=sys.stderr)
        return 2
    print(f"{args.output}: {shape.family}, {shape.layers} layers, {shape.vocab} tokens, {sum(sizes.values()) / 1e6:.1f} MB: "
          + ", ".join(f"{kind} {size / 1e6:.1f} MB" for kind, size in sorted(sizes.items(), key=lambda item: -item[1])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
