"""The demo model in PyTorch: a Qwen3.5 text model of 34 M parameters with one MTP block, for training and for making its GGUF file.

Parameter names are those of a checkpoint directory, so state_dict() is what model.safetensors holds. Everything but the projections is computed
in float32. The engine does not use this file; it is the other side of comparisons.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "dtype": "bfloat16", "hidden_act": "silu", "hidden_size": 512,
    "intermediate_size": 1280, "num_hidden_layers": 8, "full_attention_interval": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 64, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4, "attn_output_gate": True, "attention_bias": False, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048,
    "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "tie_word_embeddings": True, "vocab_size": 12288,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
                        "mrope_section": [3, 3, 2]},
}
CHUNK = 64  # positions of the delta rule solved together


class Scale(nn.Module):
    """The weight of an RMS norm. Zero-centred, that is, used as 1 + w, unless plain."""

    def __init__(self, width: int, plain: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), float(plain)))
        self.shift = 0.0 if plain else 1.0

    def forward(self, x: Tensor) -> Tensor:
        f = x.float()
        return (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]) * (self.shift + self.weight.float())).to(x.dtype)


class Projection(nn.Linear):
    """A bias-free product whose float32 weight follows the type of its input."""

    def __init__(self, width: int, out: int):
        super().__init__(width, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Turns pairs (i, i + half) of the first quarter of each head, x [batch, rows, heads, 64]."""
    rope = CONFIG["rope_parameters"]
    dims = int(CONFIG["head_dim"] * rope["partial_rotary_factor"])
    angle = positions.float()[:, None] * rope["rope_theta"] ** (-torch.arange(0, dims, 2, device=x.device).float() / dims)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b, rest = x[..., : dims // 2], x[..., dims // 2 : dims], x[..., dims:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def diagonal_blocks(a: Tensor, size: int) -> Tensor:
    """[..., n, n] -> [..., n / size, size, size]."""
    parts = a.shape[-1] // size
    return a.reshape(*a.shape[:-2], parts, size, parts, size).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


class UnitInverse(torch.autograd.Function):
    """(1 + a)^-1 for the part of a [..., CHUNK, CHUNK] below the diagonal: row by row in blocks of 16, then by halves.

    The inverse of [[P, 0], [B, R]] has those of P and R on its diagonal and -R^-1 B P^-1 below.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, a: Tensor) -> Tensor:
        size = 16
        blocks = diagonal_blocks(a, size)
        out = torch.eye(size, dtype=a.dtype, device=a.device).expand(blocks.shape).contiguous()
        for i in range(1, size):
            out[..., i, :i] = -(blocks[..., i, :i, None] * out[..., :i, :i]).sum(-2)
        while size < a.shape[-1]:
            blocks = diagonal_blocks(a, 2 * size)
            p, r = out[..., ::2, :, :], out[..., 1::2, :, :]
            low = -(r @ blocks[..., size:, :size] @ p)
            out = torch.cat([torch.cat([p, torch.zeros_like(p)], -1), torch.cat([low, r], -1)], -2)
            size *= 2
        out = out[..., 0, :, :]
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        return -(out.mT @ grad @ out.mT).tril(-1)


class States(torch.autograd.Function):
    """The states at the start of each chunk, s[0] = 0 and s[i + 1] = keep[i] s[i] + add[i]; all [chunks, B * H, d, d]."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, keep: Tensor, add: Tensor) -> Tensor:
        states = torch.empty_like(add)
        states[0].zero_()
        for i in range(len(add) - 1):
            torch.baddbmm(add[i], keep[i], states[i], out=states[i + 1])
        ctx.save_for_backward(keep, states)
        return states

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor]:
        keep, states = ctx.saved_tensors
        out, grad = torch.empty_like(states), grad.contiguous()  # out[i]: the gradient of s[i + 1]
        out[-1].zero_()
        for i in range(len(out) - 1, 0, -1):
            torch.baddbmm(grad[i], keep[i].mT, out[i], out=out[i - 1])
        return out @ states.mT, out


def chunked(x: Tensor, heads: int) -> Tensor:
    """[B, T, H, w] -> [chunks, B * heads, CHUNK, w], float32, heads repeated to `heads`, rows padded with zeros."""
    x = F.pad(x.float(), (0, 0, 0, 0, 0, -x.shape[1] % CHUNK))
    batch, ratio, width = len(x), heads // x.shape[2], x.shape[3]
    x = x.reshape(batch, -1, CHUNK, x.shape[2], 1, width).expand(-1, -1, -1, -1, ratio, -1)
    return x.permute(1, 0, 3, 4, 2, 5).reshape(-1, batch * heads, CHUNK, width)


def delta_system(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """What each chunk needs: its triangular system, the system's right sides, and how queries and the chunk's end read."""
    heads = v.shape[2]
    q, k, v, beta = chunked(q * v.shape[3] ** -0.5, heads), chunked(k, heads), chunked(v, heads), chunked(beta[..., None], heads)
    total = chunked(decay[..., None], heads)[..., 0].cumsum(-1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
    grown, weighted = total.exp()[..., None], k * beta
    to_end = (k * (total[..., -1:] - total).exp()[..., None]).mT
    return weighted @ k.mT * between, torch.cat([v * beta, weighted * grown], -1), q @ k.mT * between, q * grown, to_end, total[..., -1:, None].exp()


def delta_affine(inverse: Tensor, right: Tensor, among: Tensor, queries: Tensor, to_end: Tensor, left: Tensor) -> tuple[Tensor, ...]:
    """A chunk's end state as keep * state + add, its outputs as read * state + own."""
    width = queries.shape[-1]
    fresh, read = (inverse @ right).split([right.shape[-1] - width, width], -1)
    keep = torch.eye(width, device=right.device) * left - to_end @ read
    return keep, to_end @ fresh, queries - among @ read, among @ fresh


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Gated delta rule over whole sequences. q, k [B, T, Hk, d] of unit length, v [B, T, Hv, d], decay (<= 0) and beta [B, T, Hv].

    In a chunk the corrections d_i = beta_i (v_i - decayed state read by k_i) form a unit triangular system; it is solved for all chunks at once as
    an affine function of the state at the chunk's start, and only those states are then found one after the other.
    """
    batch, rows, heads, width = v.shape
    system, *rest = delta_system(q, k, v, decay, beta)
    keep, add, read, own = delta_affine(UnitInverse.apply(system), *rest)
    out = read @ States.apply(keep, add) + own
    return out.reshape(-1, batch, heads, CHUNK, width).permute(1, 0, 3, 2, 4).reshape(batch, -1, heads, width)[:, :rows]


class DeltaNet(nn.Module):
    """Projections, causal convolution over four tokens, delta rule, gated norm."""

    def __init__(self):
        super().__init__()
        c = CONFIG
        self.key_width = c["linear_num_key_heads"] * c["linear_key_head_dim"]
        self.heads, self.dim = c["linear_num_value_heads"], c["linear_value_head_dim"]
        value_width, width = self.heads * self.dim, c["hidden_size"]
        self.in_proj_qkv = Projection(width, 2 * self.key_width + value_width)
        self.in_proj_z, self.in_proj_b, self.in_proj_a = Projection(width, value_width), Projection(width, self.heads), Projection(width, self.heads)
        channels = 2 * self.key_width + value_width
        self.conv1d = nn.Conv1d(channels, channels, c["linear_conv_kernel_dim"], groups=channels, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.heads).uniform_(1, 16).log())
        step = torch.exp(torch.empty(self.heads).uniform_(math.log(1e-3), math.log(0.1)))
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # softplus(dt_bias) = step
        self.norm = Scale(self.dim, plain=True)
        self.out_proj = Projection(value_width, width)

    def inputs(self, u: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys, values, decay and beta of the delta rule."""
        batch, rows, _ = u.shape
        taps = self.conv1d.weight.float()[:, 0]
        raw = F.pad(self.in_proj_qkv(u).float(), (0, 0, taps.shape[1] - 1, 0))
        mixed = F.silu(sum(raw[:, j : j + rows] * taps[:, j] for j in range(taps.shape[1])))
        q, k, v = mixed.split([self.key_width, self.key_width, self.heads * self.dim], -1)
        q, k = (x.view(batch, rows, -1, self.dim) for x in (q, k))
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        decay = -self.A_log.float().exp() * F.softplus(self.in_proj_a(u).float() + self.dt_bias.float())
        return q, k, v.reshape(batch, rows, self.heads, self.dim), decay, torch.sigmoid(self.in_proj_b(u).float())

    def outputs(self, o: Tensor, u: Tensor) -> Tensor:
        batch, rows, _ = u.shape
        o = self.norm(o) * F.silu(self.in_proj_z(u).float().view(batch, rows, self.heads, self.dim))
        return self.out_proj(o.reshape(batch, rows, -1).to(u.dtype))

    def forward(self, u: Tensor) -> Tensor:
        return self.outputs(delta_rule(*self.inputs(u)), u)


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Attention(nn.Module):
    """Grouped-query attention with per-head norms and an output gate that comes with the query."""

    def __init__(self):
        super().__init__()
        c = CONFIG
        self.heads, self.kv, self.dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        self.q_proj = Projection(c["hidden_size"], 2 * self.heads * self.dim)
        self.k_proj, self.v_proj = (Projection(c["hidden_size"], self.kv * self.dim) for _ in range(2))
        self.o_proj = Projection(self.heads * self.dim, c["hidden_size"])
        self.q_norm, self.k_norm = Scale(self.dim), Scale(self.dim)

    def forward(self, u: Tensor, attend: Attend, before: tuple[list[Tensor], list[Tensor]] = ((), ())) -> tuple[Tensor, Tensor, Tensor]:
        """`before`: keys and values of other rows, put in front of this call's; returns the output and this call's keys and values."""
        batch, rows, _ = u.shape
        positions = torch.arange(rows, device=u.device)
        q, gate = self.q_proj(u).view(batch, rows, self.heads, 2 * self.dim).split(self.dim, -1)
        q = rotate(self.q_norm(q.float()), positions).to(u.dtype).transpose(1, 2)
        k = rotate(self.k_norm(self.k_proj(u).view(batch, rows, self.kv, self.dim).float()), positions).to(u.dtype).transpose(1, 2)
        v = self.v_proj(u).view(batch, rows, self.kv, self.dim).transpose(1, 2)
        o = attend(q, torch.cat([*before[0], k], 2), torch.cat([*before[1], v], 2)).transpose(1, 2)
        return self.o_proj((o * torch.sigmoid(gate.float()).to(o.dtype)).reshape(batch, rows, -1)), k, v


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        width, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
        self.gate_proj, self.up_proj, self.down_proj = Projection(width, inner), Projection(width, inner), Projection(inner, width)

    def forward(self, u: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(u)) * self.up_proj(u))


class Block(nn.Module):
    def __init__(self, full: bool):
        super().__init__()
        self.full = full
        if full:
            self.self_attn = Attention()
        else:
            self.linear_attn = DeltaNet()
        self.mlp = FeedForward()
        self.input_layernorm, self.post_attention_layernorm = Scale(CONFIG["hidden_size"]), Scale(CONFIG["hidden_size"])

    def rest(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.post_attention_layernorm(x))

    def forward(self, x: Tensor) -> Tensor:
        u = self.input_layernorm(x)
        return self.rest(x + (self.self_attn(u, causal)[0] if self.full else self.linear_attn(u)))


class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(CONFIG["vocab_size"], CONFIG["hidden_size"])
        every = CONFIG["full_attention_interval"]
        self.layers = nn.ModuleList(Block(i % every == every - 1) for i in range(CONFIG["num_hidden_layers"]))
        self.norm = Scale(CONFIG["hidden_size"])


class Drafter(nn.Module):
    """The MTP block. Row m reads the embedding of token m and a hidden state of row m - 1, and predicts token m + 1."""

    def __init__(self):
        super().__init__()
        width = CONFIG["hidden_size"]
        self.fc = Projection(2 * width, width)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = Scale(width), Scale(width), Scale(width)
        self.layers = nn.ModuleList([Block(True)])

    def forward(self, tokens: Tensor, hidden: Tensor, attend: Attend, before: tuple = ((), ())) -> tuple[Tensor, Tensor, Tensor]:
        """tokens, hidden [B, T, width]; returns the normed output, keys and values."""
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(tokens), self.pre_fc_norm_hidden(shifted(hidden))], -1))
        block = self.layers[0]
        o, k, v = block.self_attn(block.input_layernorm(x), attend, before)
        return self.norm(block.rest(x + o)), k, v


def shifted(x: Tensor) -> Tensor:
    """Row m gets row m - 1, row 0 zeros."""
    return F.pad(x[:, :-1], (0, 0, 1, 0))


def chain_allows(step: int, rows: int, query: Tensor, key: Tensor) -> Tensor:
    """Whether row `query` of draft step `step` sees key number `key` of the keys of steps 1..step laid end to end.

    A draft that has come to step s at row m went through the rows of steps 1..s-1 just before m: it sees what the trunk-fed step wrote up to row
    m - s + 1, and one row of each later step.
    """
    at, index = key // rows, key % rows
    return torch.where(at == 0, index <= query - step + 1, index == query - step + 1 + at)


class Demo(nn.Module):
    def __init__(self):
        super().__init__()
        self.model, self.mtp = Trunk(), Drafter()

    def hidden(self, ids: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """(embeddings, hidden states after the final norm), both [B, T, width]."""
        tokens = F.embedding(ids, self.model.embed_tokens.weight).to(dtype)
        x = tokens
        for layer in self.model.layers:
            x = layer(x)
        return tokens, self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight.to(hidden.dtype)).float()

    def drafts(self, tokens: Tensor, hidden: Tensor, steps: list[tuple[int, Attend]]) -> list[Tensor]:
        """Outputs of the trunk-fed draft step and of further self-fed ones. steps: (sequences of the batch used, attention) for each of them."""
        out, keys, values = [], [], []
        for count, attend in steps:
            hidden, tokens = hidden[:count], tokens[:count]
            keys, values = [k[:count] for k in keys], [v[:count] for v in values]
            hidden, k, v = self.mtp(tokens, hidden, attend, (keys, values))
            keys, values = [*keys, k], [*values, v]
            out.append(hidden)
        return out


def chain_attention(step: int, rows: int, device: torch.device | str) -> Attend:
    """Attention of one draft step by a dense mask; the first step's is plainly causal. Every row sees at least itself."""
    if step == 1:
        return causal
    query, key = torch.arange(rows, device=device)[:, None], torch.arange(step * rows, device=device)[None]
    mask = chain_allows(step, rows, query, key)
    return lambda q, k, v: F.scaled_dot_product_attention(q, *(x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v)), attn_mask=mask)


def load(folder: Path) -> Demo:
    """The model of a checkpoint directory, float32, in evaluation mode."""
    from safetensors.torch import load_file

    if (found := json.loads((folder / "config.json").read_text())["hidden_size"]) != CONFIG["hidden_size"]:
        raise SystemExit(f"{folder}: hidden_size {found}, this model has {CONFIG['hidden_size']}")
    model = Demo()
    model.load_state_dict({name: t.float() for name, t in load_file(folder / "model.safetensors").items()})
    return model.eval()
