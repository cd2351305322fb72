"""Tiny random checkpoints of every family that `py/bw24/st_model.py` reads, and what transformers computes from them.

    python scripts/tiny_checkpoints.py OUT [FAMILY ...]           # needs torch and transformers; the package itself does not
    python scripts/tiny_checkpoints.py OUT [FAMILY ...] --again   # what is expected of folders that are there

Each folder of OUT holds config.json, model.safetensors (BF16) and expected.npz: ids [n] and, for the last ROWS of them, logits [ROWS, vocabulary] and
the rows that each layer but the last hands on, hidden [layers - 1, ROWS, width], in float32 on the CPU.
Every parameter that an initialiser leaves neutral (norms, scalars, biases, decay) is random, so that a transform left out changes the logits.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import transformers

VOCAB, WIDTH, LENGTH, ROWS = 96, 32, 40, 8
COMMON = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
          "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
GEMMA_ROPE = {"full_attention": {"rope_type": "default", "rope_theta": 1000000.0}, "sliding_attention": ROPE}
GEMMA4_ROPE = {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0}, "sliding_attention": ROPE}
QWEN35 = {"num_hidden_layers": 4, "full_attention_interval": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16,
          "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
          "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1], "mrope_interleaved": True}}
GEMMA4 = {"num_hidden_layers": 4, "global_head_dim": 32, "sliding_window": 8, "rope_parameters": GEMMA4_ROPE, "hidden_size_per_layer_input": 0,
          "layer_types": ["sliding_attention", "full_attention"] * 2, "tie_word_embeddings": True, "final_logit_softcapping": 30.0,
          "vocab_size_per_layer_input": VOCAB, "rms_norm_eps": 1e-6}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0, "beta_slow": 1.0}
DEEPSEEK = {"rms_norm_eps": 1e-6, "num_key_value_heads": 4, "head_dim": None, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
            "v_head_dim": 16, "intermediate_size": 40, "moe_intermediate_size": 8, "n_routed_experts": 8, "n_shared_experts": 2,
            "num_experts_per_tok": 2, "first_k_dense_replace": 1, "num_mtp_layers": 0}
FAMILIES = {  # name -> (config class, keys)
    "llama": ("LlamaConfig", {"rope_parameters": ROPE}),
    "llama3": ("LlamaConfig", {"rope_parameters": LLAMA3, "num_hidden_layers": 1}),
    "qwen2": ("Qwen2Config", {"rope_parameters": ROPE, "head_dim": None, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3Config", {"rope_parameters": ROPE, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3TextConfig", {"rope_parameters": GEMMA_ROPE, "num_hidden_layers": 3, "sliding_window": 8, "query_pre_attn_scalar": 16,
                                    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "tie_word_embeddings": True}),
    "qwen3_5": ("Qwen3_5TextConfig", QWEN35),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {**QWEN35, **EXPERTS, "shared_expert_intermediate_size": 32}),
    "gemma4": ("Gemma4TextConfig", {**GEMMA4, "num_global_key_value_heads": 1, "attention_k_eq_v": True}),
    "gemma4_moe": ("Gemma4TextConfig", {**GEMMA4, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "num_hidden_layers": 2,
                                        "layer_types": ["sliding_attention", "full_attention"], "enable_moe_block": True,
                                        "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}),
    "gemma4_e": ("Gemma4TextConfig", {**GEMMA4, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}),
    "qwen3_moe": ("Qwen3MoeConfig", {"rope_parameters": ROPE, **EXPERTS, "norm_topk_prob": True}),
    "hy_v3": ("HYV3Config", {"rope_parameters": ROPE, **EXPERTS, "num_shared_experts": 1}),
    "minimax_m2": ("MiniMaxM2Config", {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}, "num_local_experts": 4, "num_experts_per_tok": 2,
                                       "intermediate_size": 32}),
    "deepseek_v2": ("DeepseekV2Config", {**DEEPSEEK, "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}, "q_lora_rank": ...,
                                         "topk_method": "greedy", "n_group": 1, "topk_group": 1, "norm_topk_prob": False,
                                         "routed_scaling_factor": 1.5}),
    "deepseek_v3": ("DeepseekV3Config", {**DEEPSEEK, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, "q_lora_rank": 20,
                                         "n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5}),
}


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Random values of sensible size for every parameter and buffer that a checkpoint stores."""
    generator = torch.Generator().manual_seed(seed)
    stored = set(model.state_dict())
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name in sorted(stored & tensors.keys()):
            t = tensors[name]
            r = torch.randn(t.shape, generator=generator)
            if "A_log" in name:
                r = torch.empty(t.shape).uniform_(-4.0, 2.7, generator=generator)
            elif name.endswith("embed_tokens.weight") or "lm_head" in name:
                pass
            elif "embed_tokens_per_layer" in name:
                r = r * 0.3
            elif t.dim() >= 2:
                r = r * 1.2 / t.shape[-1] ** 0.5
            elif "gemma4" in str(type(model)).lower() or not _zero_centred(model, name):
                r = 1 + r * 0.3 if ("norm" in name or "scal" in name) else r * 0.3
            else:
                r = r * 0.3
            t.copy_(r.bfloat16().float())


def _zero_centred(model: torch.nn.Module, name: str) -> bool:
    kind = type(model).__name__
    return ("Gemma3" in kind or "Qwen3_5" in kind) and "linear_attn.norm" not in name and "norm" in name


def make(folder: Path, family: str) -> None:
    kind, keys = FAMILIES[family]
    given = {k: None if v is ... else v for k, v in {**COMMON, **keys}.items() if v is not None}  # None: the class's own default
    config = getattr(transformers, kind)(**given, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    randomise(model, sum(map(ord, family)))
    folder.mkdir(parents=True, exist_ok=True)
    expect(folder, model)
    model.bfloat16().save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    print(f"{family}: {sum(p.numel() for p in model.parameters())} parameters")
    config_file = folder / "config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()), indent=1) + "\n")


def expect(folder: Path, model: torch.nn.Module) -> None:
    """Writes expected.npz."""
    ids = torch.randint(3, VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        out = model(ids, use_cache=False, output_hidden_states=True)
    hidden = torch.stack([h[0, -ROWS:] for h in out.hidden_states[1:-1]]) if len(out.hidden_states) > 2 else torch.zeros(0, ROWS, WIDTH)
    np.savez_compressed(folder / "expected.npz", ids=ids[0].numpy().astype(np.int32), logits=out.logits[0, -ROWS:].numpy(), hidden=hidden.numpy())


def again(folder: Path) -> None:
    kind = FAMILIES[folder.name][0].replace("Config", "").removesuffix("Text")
    found = [getattr(transformers, n) for n in (f"{kind}TextForCausalLM", f"{kind}ForCausalLM") if hasattr(transformers, n)]
    expect(folder, found[0].from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("families", nargs="*", default=list(FAMILIES), help=f"of {', '.join(FAMILIES)}")
    parser.add_argument("--again", action="store_true", help="compute anew what is expected of folders that are there")
    args = parser.parse_args()
    for family in args.families:
        if args.again:
            again(args.out / family)
        else:
            make(args.out / family, family)


if __name__ == "__main__":
    main()
