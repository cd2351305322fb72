"""A complete model of 100 kB for tests: random weights, one token a byte, a chat template. What it says is noise; the tests ask how."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bw24.gguf import GGUFWriter

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB = 256 + 1 + len(SPECIALS)  # the bytes, "th", the special tokens
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_texts() -> list[str]:
    """The 256 bytes in the spelling of byte-level BPE vocabularies: printable ones as they are, the others from U+0100 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(spare)) for b in range(256)]


def q8_0(rng: np.random.Generator, columns: int, rows: int, size: float) -> bytes:
    """Random Q8_0 blocks: a half-float scale and 32 codes each."""
    blocks = np.zeros((rows * columns // 32, 34), np.uint8)
    scales = (rng.uniform(0.5, 1.5, len(blocks)) * size / 64).astype(np.float16)
    blocks[:, :2] = scales.view(np.uint8).reshape(-1, 2)
    blocks[:, 2:] = rng.integers(-127, 128, (len(blocks), 32)).astype(np.int8).view(np.uint8)
    return blocks.tobytes()


def write_tiny(path: Path, *, arch: str = "llama", context: int = 320, template: str | None = TEMPLATE, tokenizer: bool = True,
               seed: int = 1, layers: int = 2, window: int = 0, suppress: list[int] | None = None) -> Path:
    """Write the model: width 64, 4 heads of 32 over 2 KV heads, Q8_0 weights, an output matrix of its own. Returns the path."""
    rng, dim, ff, head, heads, kv_heads = np.random.default_rng(seed), 64, 96, 32, 4, 2
    with GGUFWriter(path) as w:
        for key, value in {
            "general.architecture": arch, "general.name": "Tiny", f"{arch}.context_length": context, f"{arch}.embedding_length": dim,
            f"{arch}.block_count": layers, f"{arch}.feed_forward_length": ff, f"{arch}.attention.head_count": heads,
            f"{arch}.attention.head_count_kv": kv_heads, f"{arch}.attention.key_length": head, f"{arch}.attention.value_length": head,
            f"{arch}.attention.layer_norm_rms_epsilon": 1e-5, f"{arch}.rope.freq_base": 10000.0,
        }.items():
            w.add(key, value)
        if window:
            w.add(f"{arch}.attention.sliding_window", window)
        if suppress is not None:
            w.add("tokenizer.ggml.suppress_tokens", suppress, "i32")
        if tokenizer:
            w.add("tokenizer.ggml.model", "gpt2")
            w.add("tokenizer.ggml.pre", "smollm")
            w.add("tokenizer.ggml.tokens", byte_texts() + ["th", *SPECIALS])
            w.add("tokenizer.ggml.token_type", [1] * 257 + [3] * len(SPECIALS), "i32")
            w.add("tokenizer.ggml.merges", ["t h"])
            w.add("tokenizer.ggml.eos_token_id", 259)
            w.add("tokenizer.ggml.bos_token_id", 257)
            w.add("tokenizer.ggml.add_bos_token", False)
        if template and tokenizer:
            w.add("tokenizer.chat_template", template)

        def matrix(name: str, columns: int, rows: int, size: float = 1.0) -> None:
            w.add_tensor(name, "Q8_0", (columns, rows), q8_0(rng, columns, rows, size))

        def vector(name: str, n: int) -> None:
            w.add_tensor(name, "F32", (n,), rng.uniform(0.8, 1.2, n).astype(np.float32).tobytes())

        matrix("token_embd.weight", dim, VOCAB)
        for i in range(layers):
            block(matrix, vector, f"blk.{i}.", arch, dim, ff, head, heads, kv_heads)
        vector("output_norm.weight", dim)
        matrix("output.weight", dim, VOCAB, 0.4)
    return path


def block(matrix, vector, p: str, arch: str, dim: int, ff: int, head: int, heads: int, kv_heads: int) -> None:
    """The tensors of one layer."""
    for norm in ("attn_norm", "ffn_norm") + (("post_attention_norm", "post_ffw_norm") if arch == "gemma3" else ()):
        vector(f"{p}{norm}.weight", dim)
    if arch in ("gemma3", "qwen3"):
        vector(f"{p}attn_q_norm.weight", head)
        vector(f"{p}attn_k_norm.weight", head)
    matrix(f"{p}attn_q.weight", dim, heads * head, 0.3)
    for name in ("attn_k", "attn_v"):
        matrix(f"{p}{name}.weight", dim, kv_heads * head, 0.3)
    matrix(f"{p}attn_output.weight", heads * head, dim, 0.3)
    for name in ("ffn_gate", "ffn_up"):
        matrix(f"{p}{name}.weight", dim, ff, 0.3)
    matrix(f"{p}ffn_down.weight", ff, dim, 0.3)
