"""Gemma 4 for synth_model: tensors and keys of the dense, the mixture and the per-layer-embedding models. Owns names, keys and which layer attends to
a window; how a tensor's values look is synth_model's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from synth_model import Shape, Tensor

FULL_DIM = 512  # values a head of the full layers; those with a window have the shape's head_dim
ROTATED = 64  # pairs of a full layer's head that rotate: the first quarter


def full(s: Shape, i: int) -> bool:
    """Whether layer i attends to everything: the last of each six, and the last of all."""
    return i % 6 == 5 or i == s.layers - 1


def _dims(s: Shape, i: int) -> tuple[int, int]:
    return (FULL_DIM, s.extra["full_kv_heads"]) if full(s, i) else (s.head_dim, s.kv_heads)


def shared(s: Shape) -> int:
    """Layers at the end without KV of their own; in a cut model about as many, after whole rounds of six."""
    own = max(6, s.layers * (42 - s.extra["shared_kv"]) // 42 // 6 * 6)
    return max(0, s.layers - own) if s.extra["shared_kv"] else 0


def _owns_kv(s: Shape, i: int) -> bool:
    return i < s.layers - shared(s)


def ends(s: Shape, tensor: type[Tensor]) -> list[Tensor]:
    """Tensors that belong to no layer, beside the embedding and the last norm."""
    p, out = s.extra["per_layer"], [tensor("rope_freqs.weight", (FULL_DIM // 2,), "freqs")]
    if p:
        out += [tensor("per_layer_token_embd.weight", (p * s.layers, s.vocab), "embed"),
                tensor("per_layer_model_proj.weight", (s.dim, p * s.layers)), tensor("per_layer_proj_norm.weight", (p,), "norm")]
    return out


def layer(s: Shape, i: int, tensor: type[Tensor]) -> list[Tensor]:
    """Layer i. Full layers of the models without per-layer embeddings take V from K."""
    b, (dim, kv_heads), e = f"blk.{i}.", _dims(s, i), s.extra
    norms = ["attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"]
    norms += ["pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"] if e["experts"] else []
    out = [tensor(f"{b}{name}.weight", (s.dim,), "norm", i) for name in norms]
    out += [tensor(b + "attn_q.weight", (s.dim, s.heads * dim), block=i), tensor(b + "attn_q_norm.weight", (dim,), "score", i),
            tensor(b + "attn_output.weight", (s.heads * dim, s.dim), block=i), tensor(b + "layer_output_scale.weight", (1,), "norm", i)]
    if _owns_kv(s, i):
        out += [tensor(b + "attn_k.weight", (s.dim, kv_heads * dim), block=i), tensor(b + "attn_k_norm.weight", (dim,), "norm", i)]
        out += [] if full(s, i) and not e["per_layer"] else [tensor(b + "attn_v.weight", (s.dim, kv_heads * dim), block=i)]
    out += [tensor(b + "ffn_gate.weight", (s.dim, s.ff), block=i), tensor(b + "ffn_up.weight", (s.dim, s.ff), block=i),
            tensor(b + "ffn_down.weight", (s.ff, s.dim), block=i)]
    if e["experts"]:
        n, ff = e["experts"], e["expert_ff"]
        out += [tensor(b + "ffn_gate_inp.weight", (s.dim, n), "gate", i), tensor(b + "ffn_gate_inp.scale", (s.dim,), "norm", i),
                tensor(b + "ffn_gate_up_exps.weight", (s.dim, 2 * ff, n), block=i), tensor(b + "ffn_down_exps.weight", (ff, s.dim, n), block=i),
                tensor(b + "ffn_down_exps.scale", (n,), "norm", i)]
    if p := e["per_layer"]:
        out += [tensor(b + "inp_gate.weight", (s.dim, p), block=i), tensor(b + "proj.weight", (p, s.dim), block=i),
                tensor(b + "post_norm.weight", (s.dim,), "norm", i)]
    return out


def keys(s: Shape) -> dict[str, Any]:
    """The family's metadata; it replaces the common head counts and sizes where layers differ."""
    e, layers = s.extra, range(s.layers)
    out: dict[str, Any] = {
        "attention.head_count_kv": [_dims(s, i)[1] for i in layers], "attention.sliding_window": e["window"],
        "attention.sliding_window_pattern": [not full(s, i) for i in layers], "attention.shared_kv_layers": shared(s),
        "attention.key_length": FULL_DIM, "attention.value_length": FULL_DIM, "attention.key_length_swa": s.head_dim,
        "attention.value_length_swa": s.head_dim, "rope.dimension_count": FULL_DIM, "rope.dimension_count_swa": s.head_dim,
        "rope.freq_base_swa": 10000.0, "embedding_length_per_layer_input": e["per_layer"], "final_logit_softcapping": 30.0,
    }
    if e["experts"]:
        out |= {"expert_count": e["experts"], "expert_used_count": e["top"], "expert_feed_forward_length": e["expert_ff"]}
    return out
