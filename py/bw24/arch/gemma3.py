"""Architecture `gemma3`: sandwich norms, five sliding-window layers to one full layer, GELU; the embedding is scaled by sqrt(width).

Full layers rotate with `rope.freq_base` and the linear scaling factor, window layers with `rope.freq_base_swa` and no scaling. Scores are scaled by
1 / sqrt(head size), in the 27B model by 1 / sqrt(width / heads); no key of the file says so, its depth does."""

from __future__ import annotations

import numpy as np

from ..build import ListBuilder, Params
from . import common

LAYERS_27B = 62
PERIOD = 6  # where the file gives no pattern: every sixth layer is full


def windows(hp: Params, layers: int) -> list[int]:
    """Window of each layer, 0 for full attention."""
    window = hp.int("attention.sliding_window", 0, low=0)
    period = hp.int("attention.sliding_window_pattern", PERIOD, high=1024)
    return [window if i % period < period - 1 else 0 for i in range(layers)]


def build(b: ListBuilder, hp: Params) -> None:
    d = common.Dims.read(hp)
    score = (d.width / d.heads if d.layers == LAYERS_27B else d.head_dim) ** -0.5
    swa_base = hp.float("rope.freq_base_swa", 10000.0, low=1.0)
    common.embed(b, d, float(np.sqrt(np.float32(d.width))))
    for i, window in enumerate(windows(hp, d.layers)):
        p = f"blk.{i}."
        b.norm(y=b.buf("h", d.width), x="x", w=p + "attn_norm.weight", eps=d.eps)
        common.qkv(b, d, p, "h")
        b.norm(y="q", x="q", w=p + "attn_q_norm.weight", heads=d.heads, eps=d.eps)
        b.norm(y="k", x="k", w=p + "attn_k_norm.weight", heads=d.kv_heads, eps=d.eps)
        base, scale = (swa_base, 1.0) if window else (d.rope_base, d.rope_scale)
        att = common.attend(b, d, i, style="neox", base=base, scale=scale, window=window, score=score)
        tag = att.removeprefix("att")
        x, h, o = "x" + tag, b.buf("h" + tag, d.width), b.buf("o" + tag, d.width)
        b.linear(y=o, x=att, w=p + "attn_output.weight")
        b.norm(y=h, x=o, w=p + "post_attention_norm.weight", eps=d.eps)
        b.add(y=x, a=x, b=h)
        b.norm(y=h, x=x, w=p + "ffn_norm.weight", eps=d.eps)
        common.glu_ffn(b, p, h, o, "gelu", tag)
        b.norm(y=h, x=o, w=p + "post_ffw_norm.weight", eps=d.eps)
        b.add(y=x, a=x, b=h)
    common.head(b, d, hp.float("final_logit_softcapping", None))
