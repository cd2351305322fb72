"""Qwen3.5 and 3.6, dense and with experts: names, keys, and the order of the value heads.

In the checkpoint value head h belongs to key head h // r; GGUF's order is tiled, value head j belonging to key head j % key_heads. Everything
that has value heads along an axis is reordered here, so that both file formats feed one list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from .st_config import Config, exp_negated
from .st_map import ATTENTION, DENSE_FFN, Family, Slot


class Qwen35(Family):
    arch = "qwen35"
    layer_names = {
        **ATTENTION, **DENSE_FFN, "post_attention_layernorm": "post_attention_norm", "linear_attn.in_proj_qkv": "attn_qkv",
        "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_b": "ssm_beta", "linear_attn.in_proj_a": "ssm_alpha",
        "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
    }
    bare_names = {"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"}
    mtp_names = {"mtp.fc": "eh_proj", "mtp.pre_fc_norm_embedding": "enorm", "mtp.pre_fc_norm_hidden": "hnorm", "mtp.norm": "shared_head_norm"}
    zero_centred_norms = True

    def __init__(self, config: Config):
        super().__init__(config)
        self.key_heads = config.int("linear_num_key_heads", high=4096)
        self.value_heads = config.int("linear_num_value_heads", high=4096)
        self.key_dim, self.value_dim = config.int("linear_key_head_dim", high=4096), config.int("linear_value_head_dim", high=4096)
        if self.value_heads % self.key_heads:
            raise config.fail("linear_num_value_heads", f"a multiple of {self.key_heads} key heads", self.value_heads)
        self.period = config.int("full_attention_interval", 4, high=1024)

    def survey(self, names: Iterable[str]) -> None:
        self.nextn = int(any(n.startswith("mtp.") for n in names))

    def slots(self, name: str) -> list[Slot] | None:
        if not name.startswith("mtp."):
            return super().slots(name)
        if name.startswith("mtp.layers.0."):
            return self.layer_slots(self.layers, name.removeprefix("mtp.layers.0."))
        base = name.removesuffix(".weight")
        return [Slot(f"blk.{self.layers}.nextn.{self.mtp_names[base]}.weight")] if base in self.mtp_names else None

    def layer_slots(self, layer: int, name: str) -> list[Slot] | None:
        if name in self.bare_names:
            return [Slot(f"blk.{layer}.{self.bare_names[name]}")]
        return super().layer_slots(layer, name)

    def _tiled(self, width: int) -> np.ndarray:
        """Order of the values of all value heads, `width` values each."""
        ratio = self.value_heads // self.key_heads
        j = np.arange(self.value_heads)
        heads = (j % self.key_heads) * ratio + j // self.key_heads
        return (heads[:, None] * width + np.arange(width)).reshape(-1)

    def row_order(self, target: str, rows: int) -> np.ndarray | None:
        name = target.split(".", 2)[-1].removesuffix(".weight")
        if name in ("attn_qkv", "ssm_conv1d"):
            keys = 2 * self.key_heads * self.key_dim
            return np.concatenate([np.arange(keys), keys + self._tiled(self.value_dim)])
        if name == "attn_gate":
            return self._tiled(self.value_dim)
        if name in ("ssm_beta", "ssm_alpha", "ssm_a", "ssm_dt.bias"):
            return self._tiled(1)
        return None

    def column_order(self, target: str) -> np.ndarray | None:
        return self._tiled(self.value_dim) if target.endswith(".ssm_out.weight") else None

    def change(self, target: str) -> Callable[[np.ndarray], np.ndarray] | None:
        if target.endswith(".ssm_a"):
            return exp_negated
        return None if target.endswith(".ssm_norm.weight") else super().change(target)

    def metadata(self) -> dict[str, Any]:
        a, c, rope = self.arch, self.config, self.rope()
        c.expect("attn_output_gate", True)
        c.expect("hidden_act", "silu")
        out = {
            **super().metadata(), **rope.metadata(a), f"{a}.rope.dimension_count": self.rotated(rope),
            f"{a}.full_attention_interval": self.period, f"{a}.ssm.conv_kernel": c.int("linear_conv_kernel_dim", high=64),
            f"{a}.ssm.state_size": self.key_dim, f"{a}.ssm.group_count": self.key_heads, f"{a}.ssm.time_step_rank": self.value_heads,
            f"{a}.ssm.inner_size": self.value_heads * self.value_dim,
        }
        sections = rope.sets.get("mrope_section", [11, 11, 10])
        if type(sections) is not list or len(sections) > 4 or not all(type(s) is int and 0 <= s <= 1024 for s in sections):
            raise c.fail("rope_parameters.mrope_section", "up to four numbers", sections)
        out[f"{a}.rope.dimension_sections"] = (sections + [0] * 4)[:4]
        kinds = c.words("layer_types", self.layers, ("linear_attention", "full_attention"))
        if kinds is not None:
            recurrent = [kind == "linear_attention" for kind in kinds]
            if recurrent != [(i + 1) % self.period != 0 for i in range(self.layers)]:
                out[f"{a}.attention.recurrent_layers"] = recurrent + [False] * self.nextn
        return out


class Qwen35Moe(Qwen35):
    arch = "qwen35moe"
    layer_names = {
        **Qwen35.layer_names, "mlp.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
        **{f"mlp.shared_expert.{m}_proj": f"ffn_{m}_shexp" for m in ("gate", "up", "down")},
    }

    def metadata(self) -> dict[str, Any]:
        a, c = self.arch, self.config
        out = super().metadata()
        out.pop(f"{a}.feed_forward_length", None)
        return {
            **out, f"{a}.expert_count": c.int("num_experts", high=4096), f"{a}.expert_used_count": c.int("num_experts_per_tok", high=256),
            f"{a}.expert_feed_forward_length": c.int("moe_intermediate_size"),
            f"{a}.expert_shared_feed_forward_length": c.int("shared_expert_intermediate_size"),
        }
