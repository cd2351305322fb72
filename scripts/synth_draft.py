#!/usr/bin/env python3
"""Writes random-weight drafters for synth_model's shapes, in the layout of published drafts: an MTP block with a head cut to the first rows, or a
Gemma 4 assistant. For measuring what rounds cost, with drafts accepted by `bw24 bench --accept`; never for what they propose.

Owns which tensors a drafter has and which type each gets. The model's own weights do not matter to it: one file serves every type of its shape."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

import synth_gemma4  # noqa: E402
from synth_model import (  # noqa: E402
    FAMILIES,
    SHAPES,
    Bw24Error,
    GGUFWriter,
    Shape,
    Tensor,
    add_tensors,
    add_vocabulary,
    model_keys,
    type_plan,
)

ROWS = 32768  # of a cut head
WINDOWED = 3  # layers of an assistant that ask a sliding-window layer's keys; the last one asks a full layer's
FF = {256: 2048, 1024: 8192}  # an assistant's feed-forward width by its own


def mtp_tensors(s: Shape, rows: int) -> list[Tensor]:
    """The block after the trunk, which always attends, and the head's rows."""
    i, p = s.layers, f"blk.{s.layers}.nextn."
    if s.family not in ("qwen35", "qwen35moe"):
        raise Bw24Error(f"family {s.family} has no MTP block here")
    block = FAMILIES[s.family].layer(replace(s, extra={**s.extra, "interval": 1}), i)
    norms = [Tensor(f"{p}{name}.weight", (s.dim,), "norm", i) for name in ("enorm", "hnorm", "shared_head_norm")]
    return [*block, *norms, Tensor(p + "eh_proj.weight", (2 * s.dim, s.dim), block=i), Tensor("output.weight", (s.dim, min(rows, s.vocab)), "linear")]


def assistant_tensors(s: Shape, width: int, heads: int, rows: int) -> list[Tensor]:
    """Four layers without keys: three over the windowed cache, one over the full one; the head is the drafter's embedding."""
    out = [Tensor("token_embd.weight", (width, min(rows, s.vocab)), "head"), Tensor("output_norm.weight", (width,), "norm"),
           Tensor("rope_freqs.weight", (synth_gemma4.FULL_DIM // 2,), "freqs"),
           Tensor("nextn.pre_projection.weight", (2 * s.dim, width)), Tensor("nextn.post_projection.weight", (width, s.dim))]
    for i in range(WINDOWED + 1):
        b, dim = f"blk.{i}.", s.head_dim if i < WINDOWED else synth_gemma4.FULL_DIM
        names = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        out += [Tensor(f"{b}{name}.weight", (width,), "norm", i) for name in names]
        out += [Tensor(b + "attn_q.weight", (width, heads * dim), block=i), Tensor(b + "attn_q_norm.weight", (dim,), "norm", i),
                Tensor(b + "attn_output.weight", (heads * dim, width), block=i), Tensor(b + "layer_output_scale.weight", (1,), "norm", i),
                Tensor(b + "ffn_gate.weight", (width, FF[width]), block=i), Tensor(b + "ffn_up.weight", (width, FF[width]), block=i),
                Tensor(b + "ffn_down.weight", (FF[width], width), block=i)]
    return out


def assistant_keys(s: Shape, width: int, heads: int) -> dict[str, Any]:
    """The assistant's metadata; the prefix is its architecture."""
    n = WINDOWED + 1
    return {"block_count": n, "embedding_length": width, "embedding_length_out": s.dim, "feed_forward_length": FF[width], "context_length": s.context,
            "attention.head_count": heads, "attention.head_count_kv": [s.kv_heads] * WINDOWED + [s.extra["full_kv_heads"]],
            "attention.layer_norm_rms_epsilon": 1e-6, "attention.sliding_window": s.extra["window"],
            "attention.sliding_window_pattern": [i < WINDOWED for i in range(n)], "attention.shared_kv_layers": n,
            "attention.key_length": synth_gemma4.FULL_DIM, "attention.value_length": synth_gemma4.FULL_DIM, "attention.key_length_swa": s.head_dim,
            "attention.value_length_swa": s.head_dim, "rope.dimension_count": synth_gemma4.FULL_DIM, "rope.dimension_count_swa": s.head_dim,
            "rope.freq_base": s.theta, "rope.freq_base_swa": 10000.0, "nextn_predict_layers": n}


def write_draft(path: Path, name: str, shape: Shape, rows: int = ROWS, head: str = "NVFP4", block: str = "Q4_K_M", seed: int = 0,
                whole: bool = False) -> dict[str, int]:
    """A drafter for a shape's models; whole: an MTP block with vocabulary, embedding and last norm, for engines that load it as a model of its own.
    Returns bytes by storage type. Equal arguments give equal files."""
    gemma = shape.family == "gemma4"
    width, heads = (256, 4) if shape.extra.get("per_layer") else (1024, shape.heads)
    tensors = assistant_tensors(shape, width, heads, rows) if gemma else mtp_tensors(shape, rows)
    cut = "token_embd.weight" if gemma else "output.weight"
    if whole and not gemma:
        tensors += [Tensor("token_embd.weight", (shape.dim, shape.vocab), "linear"), Tensor("output_norm.weight", (shape.dim,), "norm")]
    arch = "gemma4-assistant" if gemma else shape.family
    plan = type_plan([t for t in tensors if t.name != cut], block) | {cut: head}
    with GGUFWriter(path) as writer:
        writer.add("general.architecture", arch)
        writer.add("general.name", f"random weights, drafter of the {name} shape")
        keys = {f"{arch}.{k}": v for k, v in assistant_keys(shape, width, heads).items()} if gemma else (
            {**model_keys(shape), f"{arch}.block_count": shape.layers + 1, f"{arch}.nextn_predict_layers": 1})
        for key, value in keys.items():
            writer.add(key, value)
        if whole:
            add_vocabulary(writer, shape, None)
        ids = np.arange(min(rows, shape.vocab), dtype="<i4")
        sizes = add_tensors(writer, shape, tensors, plan, seed)
        if len(ids) < shape.vocab:
            writer.add_tensor("d2t", "I32", ids.shape, ids)
    return sizes


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("shape", choices=sorted(n for n, s in SHAPES.items() if s.family in ("qwen35", "qwen35moe", "gemma4")), metavar="SHAPE")
    p.add_argument("-o", "--output", type=Path, required=True)
    p.add_argument("--rows", type=int, default=ROWS, help=f"rows of the head (default {ROWS}; all of the vocabulary: no id map)")
    p.add_argument("--head", default="NVFP4", help="type of the head (default NVFP4)")
    p.add_argument("--block", default="Q4_K_M", help="type of the other matrices (default: the mix Q4_K_M)")
    p.add_argument("--whole", action="store_true", help="with vocabulary, embedding and last norm, as engines want it that load it as a model")
    p.add_argument("--layers", type=int, help="layers of the model, where it was cut")
    return p.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    shape = SHAPES[args.shape]
    shape = replace(shape, layers=args.layers or shape.layers)
    try:
        sizes = write_draft(args.output, args.shape, shape, args.rows, args.head, args.block, whole=args.whole)
    except (Bw24Error, OSError) as error:
        print(f"synth_draft: {error}", file=sys.stderr)
        return 2
    print(f"{args.output}: {sum(sizes.values()) / 1e6:.1f} MB: " + ", ".join(f"{k} {v / 1e6:.1f} MB" for k, v in sorted(sizes.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
