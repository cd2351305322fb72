"""Architecture `qwen35`: three gated-delta-net layers to one layer of gated full attention; dense SwiGLU.

Gated delta net: four projections of the normed input (q|k|v, z, beta, alpha), a causal convolution with SiLU over q|k|v, L2-normed q and k,
a state of dk x dv a value head, the output normed a head and gated by SiLU(z). Attention: a query and a gate from one projection, RMS norms
of q and k a head, a partial rotation, the output times sigmoid(gate). `post_attention_norm` stands before the FFN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..build import ListBuilder, Params
from ..errors import Bw24Error
from . import common

INTERVAL = 4  # where the file does not say: every fourth layer attends
Ffn = Callable[[ListBuilder, str, str, str, str], None]


@dataclass(frozen=True)
class Delta:
    """Sizes of the delta-net layers."""

    k_heads: int
    v_heads: int
    dk: int
    dv: int
    taps: int

    @staticmethod
    def read(hp: Params) -> Delta:
        kh, vh, inner = hp.int("ssm.group_count", high=1024), hp.int("ssm.time_step_rank", high=1024), hp.int("ssm.inner_size")
        if vh % kh or inner % vh:
            raise Bw24Error(f"{hp.arch}.ssm: {vh} value heads over {kh} key heads and {inner} values do not divide")
        return Delta(kh, vh, hp.int("ssm.state_size", high=1024), inner // vh, hp.int("ssm.conv_kernel", low=2, high=8))


def recurrent_layers(hp: Params, layers: int) -> list[bool]:
    """Which layers are delta nets: the file's own list, else all but every interval-th."""
    said = hp.list("attention.recurrent_layers", None)
    if said is not None:
        if len(said) < layers:
            raise Bw24Error(f"{hp.arch}.attention.recurrent_layers: {len(said)} entries for {layers} layers")
        return [bool(r) for r in said[:layers]]
    interval = hp.int("full_attention_interval", INTERVAL, high=1024)
    return [(i + 1) % interval != 0 for i in range(layers)]


def delta_net(b: ListBuilder, d: common.Dims, n: Delta, i: int) -> str:
    """A delta-net layer up to its output projection. Returns the buffer that the projection reads; in the last layer it holds the wanted rows."""
    p, kd, vd = f"blk.{i}.", n.k_heads * n.dk, n.v_heads * n.dv
    mix, conv, z, out = b.buf("mix", 2 * kd + vd), b.buf("conv", 2 * kd + vd), b.buf("z", vd), b.buf("delta", vd)
    q, k, v = b.buf("gq", kd), b.buf("gk", kd), b.buf("gv", vd)
    beta, decay = b.buf("beta", n.v_heads), b.buf("decay", n.v_heads)
    b.linear(y=mix, x="h", w=p + "attn_qkv.weight")
    b.linear(y=z, x="h", w=p + "attn_gate.weight")
    b.linear(y=beta, x="h", w=p + "ssm_beta.weight")
    b.linear(y=decay, x="h", w=p + "ssm_alpha.weight")
    b.conv(y=conv, x=mix, w=p + "ssm_conv1d.weight", st=b.state(f"conv{i}", (n.taps - 1) * (2 * kd + vd)))
    for name, at in ((q, 0), (k, kd), (v, 2 * kd)):
        b.slice(y=name, x=conv, **{"from": at})
    for name in (q, k):
        b.norm(y=name, x=name, heads=n.k_heads, eps=d.eps, kind="l2")
    b.scale(y=q, x=q, c=n.dk**-0.5)
    b.sigmoid(y=beta, x=beta)
    b.decay(y=decay, x=decay, a=p + "ssm_a", dt=p + "ssm_dt.bias")
    state = b.state(f"delta{i}", vd * n.dk)
    b.delta(y=out, q=q, k=k, v=v, g=decay, b=beta, st=state, heads=n.v_heads, kheads=n.k_heads, order="tiled")
    b.norm(y=out, x=out, w=p + "ssm_norm.weight", heads=n.v_heads, eps=d.eps)
    b.glu(y=out, g=z, u=out, act="silu")
    if i < d.layers - 1:
        return out
    for name in (out, "x"):
        b.pick_rows(y=b.buf(name + "_want", b.bufs[name]), x=name)
    return out + "_want"


def attention(b: ListBuilder, d: common.Dims, i: int) -> str:
    """A gated attention layer up to its output projection, as delta_net. The file has q (with the gate), k, v apart or as one matrix."""
    p, qd, kd = f"blk.{i}.", d.heads * d.head_dim, d.kv_heads * d.head_dim
    qg, q, gate, k, v = b.buf("qg", 2 * qd), b.buf("q", qd), b.buf("gate", qd), b.buf("k", kd), b.buf("v", kd)
    if b.has(p + "attn_q.weight"):
        for y, name in ((qg, "q"), (k, "k"), (v, "v")):
            b.linear(y=y, x="h", w=f"{p}attn_{name}.weight")
    else:
        fused = b.buf("qgkv", 2 * qd + 2 * kd)
        b.linear(y=fused, x="h", w=p + "attn_qkv.weight")
        for y, at in ((qg, 0), (k, 2 * qd), (v, 2 * qd + kd)):
            b.slice(y=y, x=fused, **{"from": at})
    b.slice(y=q, x=qg, heads=d.heads)
    b.slice(y=gate, x=qg, heads=d.heads, **{"from": d.head_dim})
    b.norm(y=q, x=q, w=p + "attn_q_norm.weight", heads=d.heads, eps=d.eps)
    b.norm(y=k, x=k, w=p + "attn_k_norm.weight", heads=d.kv_heads, eps=d.eps)
    att = common.attend(b, d, i, style="neox", base=d.rope_base, scale=d.rope_scale, also=("gate",))
    b.gate(y=att, x=att, g="gate" + att.removeprefix("att"))
    return att


def dense(b: ListBuilder, p: str, x: str, y: str, tag: str) -> None:
    common.glu_ffn(b, p, x, y, "silu", tag)


def layer(b: ListBuilder, d: common.Dims, n: Delta | None, i: int, ffn: Ffn) -> None:
    """Layer i: a delta net of sizes n, or attention."""
    p, tag = f"blk.{i}.", "_want" if i == d.layers - 1 else ""
    b.norm(y=b.buf("h", d.width), x="x", w=p + "attn_norm.weight", eps=d.eps)
    mixed = delta_net(b, d, n, i) if n else attention(b, d, i)
    x, h, o = "x" + tag, b.buf("h" + tag, d.width), b.buf("o" + tag, d.width)
    b.linear(y=o, x=mixed, w=p + ("ssm_out.weight" if n else "attn_output.weight"))
    b.add(y=x, a=x, b=o)
    b.norm(y=h, x=x, w=p + "post_attention_norm.weight", eps=d.eps)
    ffn(b, p, h, o, tag)
    b.add(y=x, a=x, b=o)


def build(b: ListBuilder, hp: Params, d: common.Dims | None = None, ffn: Ffn = dense) -> None:
    d, n = d or common.Dims.read(hp, common.trunk_layers(b, hp)), Delta.read(hp)
    common.embed(b, d)
    for i, recurrent in enumerate(recurrent_layers(hp, d.layers)):
        layer(b, d, n if recurrent else None, i, ffn)
    common.head(b, d)


def mtp(b: ListBuilder, hp: Params, d: common.Dims | None = None, ffn: Ffn = dense) -> None:
    d = d or common.Dims.read(hp, common.trunk_layers(b, hp))
    common.mtp(b, d, lambda deeper, i: layer(b, deeper, None, i, ffn))
