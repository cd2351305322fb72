"""Latent attention for synth_model: the tensors and keys of deepseek2 shapes. Owns their names; the mixture is synth_moe's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import synth_moe

if TYPE_CHECKING:
    from synth_model import Shape, Tensor


def extra(nope: int, rot: int, value: int, latent: int, rank: int, sigmoid: bool, **mixture: Any) -> dict[str, Any]:
    """What only this family knows: sizes of a head, of the latent, of the query's (0: none), and the mixture with its kind of router."""
    return {"nope": nope, "rot": rot, "value": value, "latent": latent, "rank": rank, "sigmoid": sigmoid, **mixture}


def layer(s: Shape, i: int, tensor: type[Tensor]) -> list[Tensor]:
    """Layer i. The shared experts are one of their joint width."""
    e, b = s.extra, f"blk.{i}."
    q = s.heads * (e["nope"] + e["rot"])
    norms = {"attn_norm": s.dim, "ffn_norm": s.dim, "attn_kv_a_norm": e["latent"], **({"attn_q_a_norm": e["rank"]} if e["rank"] else {})}
    shapes = {"attn_q_a": (s.dim, e["rank"]), "attn_q_b": (e["rank"], q)} if e["rank"] else {"attn_q": (s.dim, q)}
    shapes |= {"attn_kv_a_mqa": (s.dim, e["latent"] + e["rot"]), "attn_k_b": (e["nope"], e["latent"], s.heads),
               "attn_v_b": (e["latent"], e["value"], s.heads), "attn_output": (s.heads * e["value"], s.dim)}
    out = [tensor(f"{b}{name}.weight", (n,), "norm", i) for name, n in norms.items()]
    out = synth_moe.layer(s, i, tensor, [*out, *(tensor(f"{b}{name}.weight", shape, block=i) for name, shape in shapes.items())])
    wide = {f"{b}ffn_{m}_shexp.weight": (s.dim, e["expert_ff"] * e["shared"]) for m in ("gate", "up")}
    wide[b + "ffn_down_shexp.weight"] = (e["expert_ff"] * e["shared"], s.dim)
    out = [tensor(t.name, wide[t.name], t.role, t.block) if t.name in wide else t for t in out]
    return out if e["sigmoid"] else [t for t in out if t.role != synth_moe.BIAS]


def keys(s: Shape) -> dict[str, Any]:
    """The family's metadata beside and instead of the common keys."""
    e = s.extra
    return {
        "attention.head_count_kv": 1, "attention.key_length": e["latent"] + e["rot"], "attention.value_length": e["latent"],
        "attention.key_length_mla": e["nope"] + e["rot"], "attention.value_length_mla": e["value"], "attention.kv_lora_rank": e["latent"],
        **({"attention.q_lora_rank": e["rank"]} if e["rank"] else {}), "rope.dimension_count": e["rot"], "leading_dense_block_count": e["dense"],
        "rope.scaling.type": "yarn", "rope.scaling.factor": 40.0, "rope.scaling.original_context_length": 4096,
        "rope.scaling.yarn_log_multiplier": 0.1 if e["sigmoid"] else 0.0707, "expert_count": e["experts"], "expert_used_count": e["top"],
        "expert_shared_count": e["shared"], "expert_feed_forward_length": e["expert_ff"], "expert_gating_func": 2 if e["sigmoid"] else 1,
        "expert_weights_norm": e["sigmoid"], "expert_weights_scale": 2.5 if e["sigmoid"] else 1.0,
        **({"expert_group_count": e["groups"], "expert_group_used_count": e["kept"]} if e.get("groups") else {}),
    }
