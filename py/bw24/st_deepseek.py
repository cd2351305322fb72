"""DeepSeek's families with latent attention: deepseek_v2 and deepseek_v3. Knows their names and keys, and how the matrix that makes keys and values
from the latent is taken apart; the assembly is st_map's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from .st_config import Config, Rope
from .st_map import DENSE_FFN, Family, Slot
from .st_moe import SIGMOID, SOFTMAX
from .st_quant import Source

LATENT_ATTENTION = {
    "self_attn.q_proj": "attn_q", "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm", "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}
NEXTN = {"eh_proj": "nextn.eh_proj", "enorm": "nextn.enorm", "hnorm": "nextn.hnorm", "shared_head.norm": "nextn.shared_head_norm",
         "shared_head.head": "nextn.shared_head_head", "embed_tokens": "nextn.embed_tokens"}


class HeadPart(Source):
    """Some of each head's rows of a matrix [heads * (nope + value), latent]: those of its values, or those of its keys as columns."""

    def __init__(self, whole: Source, heads: int, nope: int, value: int, keys: bool):
        if len(whole.shape) != 2 or whole.rows != heads * (nope + value):
            raise whole.fail(f"expected {heads} heads of {nope} + {value} rows, found shape {list(whole.shape)}")
        latent = whole.columns
        super().__init__(whole.name, (heads, latent, nope) if keys else (heads, value, latent))
        self.dtype = whole.dtype
        self._whole, self._keys, self._nope, self._each = whole, keys, nope, nope + value

    def f32(self, rows: slice | np.ndarray) -> np.ndarray:
        at, each = np.arange(self.rows)[rows], self.shape[1]
        head, inner = at // each, at % each
        if not self._keys:
            return self._whole.f32(head * self._each + self._nope + inner)
        out = np.empty((len(at), self.columns), np.float32)
        for h in np.unique(head):
            first = int(h) * self._each
            out[head == h] = self._whole.f32(slice(first, first + self._nope)).T[inner[head == h]]
        return out


class DeepseekV2(Family):
    """Softmax router, chosen weights as they are."""

    arch = "deepseek2"
    gating = SOFTMAX
    layer_names = {
        **LATENT_ATTENTION, **DENSE_FFN, **NEXTN, "mlp.gate": "ffn_gate_inp",
        **{f"mlp.shared_experts.{m}_proj": f"ffn_{m}_shexp" for m in ("gate", "up", "down")},
    }

    def __init__(self, config: Config):
        super().__init__(config)
        self.nope, self.rot = config.int("qk_nope_head_dim", high=1024), config.int("qk_rope_head_dim", high=1024)
        self.value, self.latent = config.int("v_head_dim", high=1024), config.int("kv_lora_rank", high=1024)

    def survey(self, names: Iterable[str]) -> None:
        last = f"layers.{self.layers}."
        self.nextn = int(any(n.startswith(last) for n in names))

    def layer_slots(self, layer: int, name: str) -> list[Slot] | None:
        p = f"blk.{layer}."
        if name == "self_attn.kv_b_proj.weight":
            half = lambda keys: lambda s: HeadPart(s, self.heads, self.nope, self.value, keys)  # noqa: E731
            return [Slot(p + "attn_k_b.weight", derive=half(True)), Slot(p + "attn_v_b.weight", derive=half(False))]
        if name == "mlp.gate.e_score_correction_bias":
            return [Slot(p + "exp_probs_b.bias")]
        return super().layer_slots(layer, name)

    def yarn(self, rope: Rope) -> dict[str, Any]:
        """Keys of the scaling. Both multipliers of the checkpoint must agree: then nothing is left to scale but the scores."""
        a, sets = self.arch, rope.sets
        growth = sets.get("mscale_all_dim")
        if not growth or sets.get("mscale") != growth:
            raise self.config.fail("rope_parameters.mscale", f"mscale_all_dim {growth}, which is above 0,", sets.get("mscale"))
        if sets.get("attention_factor") is not None or sets.get("truncate") is False:
            raise self.config.fail("rope_parameters", "no attention_factor, and truncate true", sets)
        return {
            f"{a}.rope.scaling.type": "yarn", f"{a}.rope.scaling.factor": rope.number("factor"),
            f"{a}.rope.scaling.original_context_length": int(rope.number("original_max_position_embeddings")),
            f"{a}.rope.scaling.yarn_log_multiplier": 0.1 * rope.number("mscale_all_dim"),
            f"{a}.rope.scaling.yarn_beta_fast": rope.number("beta_fast", 32.0), f"{a}.rope.scaling.yarn_beta_slow": rope.number("beta_slow", 1.0),
        }

    def experts(self) -> dict[str, Any]:
        """Keys of the mixture."""
        a, c = self.arch, self.config
        groups, kept = c.int("n_group", 1, high=1024), c.int("topk_group", 1, high=1024)
        return {
            f"{a}.leading_dense_block_count": c.int("first_k_dense_replace", 0, low=0, high=1024),
            f"{a}.expert_count": c.int("n_routed_experts", high=4096), f"{a}.expert_used_count": c.int("num_experts_per_tok", high=256),
            f"{a}.expert_shared_count": c.int("n_shared_experts", 0, low=0, high=64),
            f"{a}.expert_feed_forward_length": c.int("moe_intermediate_size"), f"{a}.expert_gating_func": self.gating,
            f"{a}.expert_weights_norm": c.bool("norm_topk_prob", self.gating == SIGMOID),
            f"{a}.expert_weights_scale": c.float("routed_scaling_factor", 1.0),
            **({f"{a}.expert_group_count": groups, f"{a}.expert_group_used_count": kept} if groups > 1 else {}),
        }

    def expectations(self) -> None:
        """Refuses what would compute something else."""
        self.config.expect("scoring_func", "softmax")
        self.config.expect("topk_method", "greedy", "group_limited_greedy")
        self.config.expect("norm_topk_prob", False)
        if self.config.get("topk_method") != "group_limited_greedy":
            self.config.keys["n_group"] = 1

    def metadata(self) -> dict[str, Any]:
        a, c, rope = self.arch, self.config, self.rope()
        for key, wanted in (("hidden_act", "silu"), ("attention_bias", False), ("moe_layer_freq", 1), ("rope_interleave", True)):
            c.expect(key, wanted)
        self.expectations()
        rank = c.int("q_lora_rank", None, high=1 << 20)
        keys = rope.metadata(a, ("default", "linear", "yarn"))
        return {
            **super().metadata(), **keys, **(self.yarn(rope) if rope.kind == "yarn" else {}), **(self.experts() if c.get("n_routed_experts") else {}),
            **({f"{a}.attention.q_lora_rank": rank} if rank else {}), f"{a}.attention.kv_lora_rank": self.latent,
            f"{a}.attention.head_count_kv": 1, f"{a}.attention.key_length": self.latent + self.rot, f"{a}.attention.value_length": self.latent,
            f"{a}.attention.key_length_mla": self.nope + self.rot, f"{a}.attention.value_length_mla": self.value,
            f"{a}.rope.dimension_count": self.rot,
        }


class DeepseekV3(DeepseekV2):
    """Sigmoid router with a selection bias and groups; block `num_hidden_layers` is the MTP block."""

    gating = SIGMOID

    def expectations(self) -> None:
        self.config.expect("scoring_func", "sigmoid")
        self.config.expect("topk_method", "noaux_tc")
