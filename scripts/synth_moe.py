"""Mixtures for synth_model: the tensors and keys of hy_v3 and minimax-m2 shapes, and routers that prefer some experts to a chosen degree.

Owns names, keys and the selection bias that gives a popularity. Which experts a random-weight model uses says nothing about a trained one, so a
figure measured with such a file is to be labelled synthetic.
"""

from __future__ import annotations

import functools
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from synth_model import Shape, Tensor

CURVES = {"uniform": 0.25, "hy3": 0.461, "steep": 0.7}  # share of the choices that falls on the most used quarter of a layer's experts
ROUTER, BIAS = "router", "route-bias"


def layer(s: Shape, i: int, tensor: type[Tensor], attention: list[Tensor]) -> list[Tensor]:
    """Layer i: `attention` with its norms, then a dense FFN in the first `dense` layers, else router, experts and a shared expert."""
    b, e = f"blk.{i}.", s.extra
    if i < e["dense"]:
        return [*attention, tensor(b + "ffn_gate.weight", (s.dim, s.ff), block=i), tensor(b + "ffn_up.weight", (s.dim, s.ff), block=i),
                tensor(b + "ffn_down.weight", (s.ff, s.dim), block=i)]
    name = "exp_probs_b" if s.family == "hy_v3" else "exp_probs_b.bias"
    out = [*attention, tensor(b + "ffn_gate_inp.weight", (s.dim, e["experts"]), ROUTER, i), tensor(b + name, (e["experts"],), BIAS, i),
           tensor(b + "ffn_gate_exps.weight", (s.dim, e["expert_ff"], e["experts"]), block=i),
           tensor(b + "ffn_up_exps.weight", (s.dim, e["expert_ff"], e["experts"]), block=i),
           tensor(b + "ffn_down_exps.weight", (e["expert_ff"], s.dim, e["experts"]), block=i)]
    if e["shared"]:
        out += [tensor(b + f"ffn_{which}_shexp.weight", (s.dim, e["expert_ff"]), block=i) for which in ("gate", "up")]
        out += [tensor(b + "ffn_down_shexp.weight", (e["expert_ff"], s.dim), block=i)]
    return out


def keys(s: Shape) -> dict[str, Any]:
    """The family's metadata beside the common keys."""
    e = s.extra
    out: dict[str, Any] = {"rope.dimension_count": e.get("rotary", s.head_dim), "expert_count": e["experts"], "expert_used_count": e["top"],
                           "expert_feed_forward_length": e["expert_ff"], "expert_gating_func": 2}
    if s.family == "hy_v3":
        out |= {"expert_weights_norm": True, "expert_weights_scale": 2.826, "expert_shared_feed_forward_length": e["expert_ff"]}
    return out


def shares(slope: float, experts: int, top: int, seed: int = 1, tokens: int = 4096) -> np.ndarray:
    """Share of the choices of each rank, most preferred first: scores sigmoid(N(0, 1)) plus a bias that falls by `slope` from first to last."""
    rng = np.random.default_rng(seed)
    score = 1 / (1 + np.exp(-rng.normal(size=(tokens, experts)))) + slope * (0.5 - np.arange(experts) / max(1, experts - 1))
    chosen = np.argpartition(-score, top - 1, axis=1)[:, :top]
    return np.bincount(chosen.ravel(), minlength=experts) / (tokens * top)


@functools.cache
def slope_for(share: float, experts: int, top: int) -> float:
    """The bias slope for which the first quarter of the experts gets `share` of the choices."""
    low, high = 0.0, 4.0
    for _ in range(24):
        mid = (low + high) / 2
        low, high = (mid, high) if shares(mid, experts, top)[: max(1, experts // 4)].sum() < share else (low, mid)
    return high if share > 0.25 else 0.0


def vector(t: Tensor, seed: int, skew: float, top: int) -> np.ndarray:
    """Router rows N(0, 1/sqrt(width)), so that logits are N(0, 1); a selection bias by rank, ranks drawn anew in each layer."""
    rng = np.random.default_rng([seed, zlib.crc32(t.name.encode())])
    if t.role == ROUTER:
        return (rng.normal(size=t.shape[0] * t.shape[1]) / np.sqrt(t.shape[0])).astype("<f4")
    n = t.shape[0]
    bias = slope_for(skew, n, top) * (0.5 - np.arange(n) / max(1, n - 1))
    return bias[rng.permutation(n)].astype("<f4")


def skew_of(text: str) -> float:
    """A name of CURVES or the share of the most used quarter itself, 0.25..0.95. Raises ValueError."""
    value = CURVES[text] if text in CURVES else float(text)
    if not 0.25 <= value <= 0.95:
        raise ValueError(text)
    return value
