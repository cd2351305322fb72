"""Gemma 4 (text): dense, with experts, and the small models with per-layer embeddings. Knows names and keys; the assembly is st_map's."""

from __future__ import annotations

from typing import Any

import numpy as np

from .st_config import Config
from .st_map import ATTENTION, DENSE_FFN, Family, Slot

NEVER = np.float32(1e30)  # divisor of the frequency of a pair that does not rotate


class Gemma4(Family):
    arch = "gemma4"
    layer_names = {
        **ATTENTION, **DENSE_FFN, "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm", "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
        "post_feedforward_layernorm_1": "post_ffw_norm_1", "post_feedforward_layernorm_2": "post_ffw_norm_2",
        "router.proj": "ffn_gate_inp", "per_layer_input_gate": "inp_gate", "per_layer_projection": "proj",
        "post_per_layer_input_norm": "post_norm",
    }
    bare_names = {"layer_scalar": "layer_output_scale.weight", "router.scale": "ffn_gate_inp.scale",
                  "router.per_expert_scale": "ffn_down_exps.scale"}
    top_names = {"embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
                 "per_layer_model_projection.weight": "per_layer_model_proj.weight",
                 "per_layer_projection_norm.weight": "per_layer_proj_norm.weight"}
    tied_by_default = True

    def __init__(self, config: Config):
        super().__init__(config)
        kinds = config.words("layer_types", self.layers, ("full_attention", "sliding_attention"))
        if kinds is None:
            kinds = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(self.layers)]
        self.windowed = [kind == "sliding_attention" for kind in kinds[:-1]] + [False]  # the last layer is full whatever the list says
        self.shared = config.int("num_kv_shared_layers", 0, low=0, high=self.layers - 1)
        self.full_dim = self._global("global_head_dim", "head_dim", 512)
        self.full_kv = self._global("num_global_key_value_heads", "num_key_value_heads", None) if config.bool("attention_k_eq_v", False) else None

    def _global(self, key: str, per_layer_key: str, default: int | None) -> int | None:
        """A full layer's value: of its own key, or of the per-layer settings that newer configs hold instead."""
        if self.config.get(key) is not None:
            return self.config.int(key, high=4096)
        sets = self.config.get("per_layer_config")
        if sets is None:
            return default
        if type(sets) is not dict:
            raise self.config.fail("per_layer_config", "an object", sets)
        values = {v[per_layer_key] for k, v in sets.items() if type(v) is dict and type(v.get(per_layer_key)) is int}
        if len(values) > 1:
            raise self.config.fail(f"per_layer_config.*.{per_layer_key}", "one value for all full layers", sorted(values))
        return values.pop() if values else default

    def slots(self, name: str) -> list[Slot] | None:
        return [Slot(self.top_names[name])] if name in self.top_names else super().slots(name)

    def layer_slots(self, layer: int, name: str) -> list[Slot] | None:
        if name in self.bare_names:
            return [Slot(f"blk.{layer}.{self.bare_names[name]}")]
        if layer >= self.layers - self.shared and name.startswith(("self_attn.k_", "self_attn.v_")):
            return []  # these layers read another layer's cache
        return super().layer_slots(layer, name)

    def expert_slots(self, layer: int, name: str) -> list[Slot] | None:
        if name.removesuffix(".weight") == "experts.gate_up_proj":
            return [Slot(f"blk.{layer}.ffn_gate_up_exps.weight")]
        return super().expert_slots(layer, name)

    def extra(self) -> dict[str, np.ndarray]:
        rope, pairs = self.config.rope("full_attention"), self.full_dim // 2
        turning = int(self.full_dim * rope.part / 2) if rope.kind == "proportional" else pairs
        return {"rope_freqs.weight": np.where(np.arange(pairs) < turning, np.float32(1), NEVER).astype(np.float32)}

    def metadata(self) -> dict[str, Any]:
        a, c = self.arch, self.config
        c.expect("hidden_activation", "gelu_pytorch_tanh")
        c.expect("attention_bias", False)
        c.expect("use_bidirectional_attention", "vision")
        full, local = c.rope("full_attention"), c.rope("sliding_attention")
        full.base = full.number("rope_theta", 1e6)
        if full.kind == "proportional" and full.number("factor", 1.0) != 1.0:
            raise c.fail("rope_parameters.full_attention.factor", "1", full.sets.get("factor"))
        full.metadata(a, ("default", "proportional"))
        local.metadata(a, ("default",))
        shared_from, wide = self.layers - self.shared, c.bool("use_double_wide_mlp", False)
        ffn = c.int("intermediate_size")
        out = {
            **super().metadata(), f"{a}.attention.key_length": self.full_dim, f"{a}.attention.value_length": self.full_dim,
            f"{a}.attention.key_length_swa": self.head_dim, f"{a}.attention.value_length_swa": self.head_dim,
            f"{a}.rope.dimension_count": self.full_dim, f"{a}.rope.dimension_count_swa": self.head_dim,
            f"{a}.rope.freq_base": full.base, f"{a}.rope.freq_base_swa": local.base, f"{a}.attention.sliding_window": c.int("sliding_window"),
            f"{a}.attention.sliding_window_pattern": self.windowed, f"{a}.attention.shared_kv_layers": self.shared,
            f"{a}.embedding_length_per_layer_input": c.int("hidden_size_per_layer_input", 256, low=0),
        }
        if wide and self.shared:
            out[f"{a}.feed_forward_length"] = [ffn * (2 if i >= shared_from else 1) for i in range(self.layers)]
        if self.full_kv is not None and self.full_kv != self.kv_heads:
            out[f"{a}.attention.head_count_kv"] = [self.kv_heads if w else self.full_kv for w in self.windowed]
        if (cap := c.float("final_logit_softcapping", None)) is not None:
            out[f"{a}.final_logit_softcapping"] = cap
        if c.bool("enable_moe_block", False):
            out |= {f"{a}.expert_count": c.int("num_experts", high=4096), f"{a}.expert_used_count": c.int("top_k_experts", high=256),
                    f"{a}.expert_feed_forward_length": c.int("moe_intermediate_size")}
        return out
