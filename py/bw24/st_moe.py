"""Mixture-of-experts families with plain attention: qwen3moe, hy_v3, minimax-m2. Knows their names and keys; the assembly is st_map's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .st_config import Config, Rope
from .st_map import ATTENTION, DENSE_FFN, Family, Llama, Slot

SOFTMAX, SIGMOID = 1, 2  # expert_gating_func


class Qwen3Moe(Llama):
    arch = "qwen3moe"
    layer_names = {**ATTENTION, **DENSE_FFN, "post_attention_layernorm": "ffn_norm", "mlp.gate": "ffn_gate_inp"}

    def row_order(self, target: str, rows: int) -> None:
        return None

    def metadata(self) -> dict[str, Any]:
        a, c = self.arch, self.config
        if c.get("use_sliding_window") is None:
            c.keys["use_sliding_window"] = False
        c.expect("norm_topk_prob", True)
        c.expect("decoder_sparse_step", 1)
        c.expect("mlp_only_layers", [])
        return {
            **super().metadata(), f"{a}.expert_count": c.int("num_experts", high=4096, other="num_local_experts"),
            f"{a}.expert_used_count": c.int("num_experts_per_tok", high=256),
            f"{a}.expert_feed_forward_length": c.int("moe_intermediate_size"),
        }


class HyV3(Llama):
    """A dense first layer, then sigmoid-routed experts with an ungated shared one; block `num_hidden_layers` is the MTP block."""

    arch = "hy_v3"
    layer_names = {
        **ATTENTION, **DENSE_FFN, "post_attention_layernorm": "ffn_norm", "mlp.router.gate": "ffn_gate_inp", "mlp.gate": "ffn_gate_inp",
        **{f"mlp.{shared}.{m}_proj": f"ffn_{m}_shexp" for shared in ("shared_mlp", "shared_experts") for m in ("gate", "up", "down")},
        "eh_proj": "nextn.eh_proj", "enorm": "nextn.enorm", "hnorm": "nextn.hnorm", "final_layernorm": "nextn.shared_head_norm",
    }
    # the selection bias has had four names; the tensor keeps GGUF's, which has no suffix in this architecture
    BIAS = ("mlp.expert_bias", "mlp.router.expert_bias", "mlp.e_score_correction_bias", "mlp.gate.e_score_correction_bias")

    def __init__(self, config: Config):
        super().__init__(config)
        if config.get("rope_theta", "rope_parameters") is None:
            config.keys["rope_theta"] = 11158840.0

    def survey(self, names: Iterable[str]) -> None:
        last = f"layers.{self.layers}."
        self.nextn = int(any(n.startswith(last) for n in names))

    def row_order(self, target: str, rows: int) -> None:
        return None

    def layer_slots(self, layer: int, name: str) -> list[Slot] | None:
        if name in self.BIAS:
            return [Slot(f"blk.{layer}.exp_probs_b")]
        return super().layer_slots(layer, name)

    def metadata(self) -> dict[str, Any]:
        a, c = self.arch, self.config
        width, shared = c.int("moe_intermediate_size", other="expert_hidden_dim"), c.int("num_shared_experts", 1, low=0, high=64)
        scale = c.get("router_scaling_factor")
        return {
            **super().metadata(), f"{a}.expert_count": c.int("num_experts", high=4096, other="num_local_experts"),
            f"{a}.expert_used_count": c.int("num_experts_per_tok", high=256), f"{a}.expert_feed_forward_length": width,
            f"{a}.expert_shared_feed_forward_length": width * shared, f"{a}.expert_gating_func": SIGMOID,
            f"{a}.expert_weights_norm": c.bool("route_norm", True),
            **({f"{a}.expert_weights_scale": c.float("router_scaling_factor")} if scale is not None else {}),
        }


class MiniMaxM2(Family):
    """Norms of q and k over the whole row; part of each head rotates; every layer has experts."""

    arch = "minimax-m2"
    layer_names = {**ATTENTION, "post_attention_layernorm": "ffn_norm", "block_sparse_moe.gate": "ffn_gate_inp", "mlp.gate": "ffn_gate_inp"}
    BIAS = ("block_sparse_moe.e_score_correction_bias", "mlp.e_score_correction_bias", "mlp.gate.e_score_correction_bias")

    def layer_slots(self, layer: int, name: str) -> list[Slot] | None:
        if name in self.BIAS:
            return [Slot(f"blk.{layer}.exp_probs_b.bias")]
        return super().layer_slots(layer, name)

    def rope(self) -> Rope:
        rope = super().rope()
        rope.base = rope.number("rope_theta", self.config.float("rope_theta", 5000000.0))
        if "partial_rotary_factor" not in rope.sets and (dims := self.config.int("rotary_dim", None, high=1024)):
            rope.part = dims / self.head_dim
        return rope

    def metadata(self) -> dict[str, Any]:
        a, c, rope = self.arch, self.config, self.rope()
        c.expect("scoring_func", "sigmoid")
        c.expect("hidden_act", "silu")
        c.expect("qk_norm_type", "per_layer")
        return {
            **super().metadata(), **rope.metadata(a), f"{a}.rope.dimension_count": self.rotated(rope),
            f"{a}.expert_count": c.int("num_local_experts", high=4096, other="num_experts"),
            f"{a}.expert_used_count": c.int("num_experts_per_tok", high=256), f"{a}.expert_feed_forward_length": c.int("intermediate_size"),
            f"{a}.expert_gating_func": SIGMOID,
        }
