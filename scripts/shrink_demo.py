"""Writes the demo model as the small GGUF file that the package ships: K-quants whose rounding is fitted to text.

    python scripts/shrink_demo.py CHECKPOINT OUT.gguf --text FOLDER [FOLDER ...]     # needs torch, tokenizers, safetensors
    python scripts/shrink_demo.py CHECKPOINT FILE.gguf --measure --text FOLDER ...   # loss and draft agreement of a file

Rounding a matrix column by column and spreading each column's error over the columns still to come, weighted by how the inputs of text correlate
(the method known as GPTQ), loses less than rounding each value by itself: so fewer bits give the same loss. Scales and minima are the library's.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

import demo_model
from bw24 import abi
from bw24.convert import convert
from bw24.gguf import open_gguf
from bw24.gguf_types import TYPE_IDS, TYPES
from bw24.st_model import Checkpoint, open_checkpoint
from bw24.st_tensor import Target, quantize

LENGTH = 512
BLOCK = 256
DAMP = 0.01  # of the mean diagonal, added to the input correlations
EMBEDDING_DAMP = 10.0  # the embedding is also the input, where every direction of its error counts alike
SUFFIXES = (".py", ".md", ".rst", ".txt")
# Types by tensor; the first word found in the name decides.
PLAN = (("token_embd", "Q5_K"), ("ssm_alpha", "Q6_K"), ("ssm_beta", "Q6_K"), ("attn_v", "Q6_K"), ("attn_k", "Q5_K"),
        ("blk.8.", "IQ4_XS"), ("blk.0.ffn_", "Q4_K"), ("blk.1.ffn_", "Q4_K"), ("blk.7.ffn_", "Q4_K"),
        ("ffn_gate", "IQ4_XS"), ("ffn_up", "IQ4_XS"), ("attn_gate", "IQ4_XS"), ("", "Q4_K"))


def plan(name: str) -> str:
    return next(kind for word, kind in PLAN if word in name)


# ---- text


def sequences(tokenizer: Tokenizer, folders: list[Path], count: int, seed: int) -> torch.Tensor:
    """[count, LENGTH + 1] token ids from files found below the folders; every fourth sequence is a conversation about the file."""
    files = sorted(p for f in folders for p in f.rglob("*") if p.suffix in SUFFIXES and p.is_file() and 4000 < p.stat().st_size < 200000)
    random.Random(seed).shuffle(files)
    out: list[list[int]] = []
    for path in files:
        text = path.read_text(encoding="utf-8", errors="ignore")
        if len(out) % 4 == 3:
            answer = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n```\n"
            text = (f"<|im_start|>user\nShow me {path.name}.{answer}{text[:1500]}\n```<|im_end|>\n<|im_start|>user\nGo on.{answer}{text[1500:6000]}")
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) > LENGTH:
            out.append(ids[: LENGTH + 1])
        if len(out) == count:
            return torch.tensor(out)
    raise SystemExit(f"{len(out)} texts found, {count} are needed: name more folders with --text")


# ---- correlations of inputs


class Correlations:
    """Sums of x x^T over the inputs of every projection below a module, by parameter name, while the context is open."""

    def __init__(self, module: torch.nn.Module, prefix: str):
        self.sums: dict[str, torch.Tensor] = {}
        found = [(f"{prefix}{name}.weight", m) for name, m in module.named_modules() if isinstance(m, demo_model.Projection)]
        self.hooks = [m.register_forward_pre_hook(lambda _, args, name=name: self.add(name, args[0])) for name, m in found]

    def add(self, name: str, x: torch.Tensor) -> None:
        x = x.reshape(-1, x.shape[-1]).float()
        self.sums[name] = self.sums.get(name, 0) + x.T @ x

    def __enter__(self) -> Correlations:
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()


Fit = Callable[[dict[str, torch.Tensor]], None]


@torch.no_grad()
def walk(model: demo_model.Demo, ids: torch.Tensor, fit_all: Fit, batch: int = 4) -> None:
    """Calls fit_all with the correlations of one part of the model after the other; what it rounds feeds the parts that follow."""
    parts = list(ids[:, :LENGTH].split(batch))
    steps = [(batch, demo_model.chain_attention(s, LENGTH, "cpu")) for s in (1, 2)]
    head = Correlations(torch.nn.Module(), "")
    for part in parts[: max(1, len(parts) // 2)]:
        tokens, hidden = model.hidden(part)
        for h in [hidden, *model.drafts(tokens, hidden, steps)]:
            head.add("model.embed_tokens.weight", h)
    fit_all(head.sums)
    streams = [torch.nn.functional.embedding(part, model.model.embed_tokens.weight) for part in parts]
    tokens = list(streams)
    for i, layer in enumerate(model.model.layers):
        with Correlations(layer, f"model.layers.{i}.") as found:
            for x in streams:
                layer(x)
        fit_all(found.sums)
        streams = [layer(x) for x in streams]
    with Correlations(model.mtp, "mtp.") as found:
        for t, x in zip(tokens, streams, strict=True):
            model.drafts(t, model.model.norm(x), [(len(t), attend) for _, attend in steps])
    fit_all(found.sums)


# ---- codes of K-quant blocks; a block holds 256 values


def _six_bit(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and minima [n, 8] of the 12 bytes that hold them."""
    low = raw[:, :4] & 63, raw[:, 4:8] & 63
    high = (raw[:, 8:] & 15) | (raw[:, :4] >> 6 << 4), (raw[:, 8:] >> 4) | (raw[:, 4:8] >> 6 << 4)
    return tuple(np.concatenate([a, b], 1).astype(np.float32) for a, b in zip(low, high, strict=True))


NONLINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)  # IQ4_XS: what a code stands for


def grid(kind: str, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(step [n, 256], offset [n, 256], points): a code q stands for step * points[q] + offset."""
    half = lambda at: blocks[:, at : at + 2].copy().view("<f2").astype(np.float32)  # noqa: E731
    if kind == "Q6_K":
        step = np.repeat(blocks[:, 192:208].view(np.int8).astype(np.float32) * half(208), 16, 1)
        return step, -32 * step, np.arange(64, dtype=np.float32)
    if kind == "IQ4_XS":
        low = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], 2).reshape(-1, 8)
        high = (blocks[:, 2:4].copy().view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16)) & 3
        scales = (low | high.astype(np.uint8) << 4).astype(np.float32) - 32
        return np.repeat(half(0) * scales, 32, 1), np.zeros((len(blocks), 256), np.float32), NONLINEAR
    scales, minima = _six_bit(blocks[:, 4:16])
    return np.repeat(half(0) * scales, 32, 1), np.repeat(-half(2) * minima, 32, 1), np.arange(16 if kind == "Q4_K" else 32, dtype=np.float32)


def pack(kind: str, blocks: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """The blocks with other codes [n, 256]."""
    out, n = blocks.copy(), len(blocks)
    if kind == "Q6_K":
        c = codes.reshape(n, 2, 4, 32)
        low, high = c & 15, c >> 4
        out[:, :128] = np.concatenate([low[:, :, :2] | low[:, :, 2:] << 4], 2).reshape(n, 128)
        out[:, 128:192] = (high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6).reshape(n, 64)
        return out
    if kind == "IQ4_XS":
        pairs = codes.reshape(n, 8, 2, 16)
        out[:, 8:] = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(n, 128)
        return out
    pairs = (codes & 15).reshape(n, 4, 2, 32)
    out[:, -128:] = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(n, 128)
    if kind == "Q5_K":
        bits = (codes >> 4).reshape(n, 8, 32)
        out[:, 16:48] = (bits << np.arange(8, dtype=np.uint8)[:, None]).sum(1).astype(np.uint8)
    return out


def fit(values: np.ndarray, moments: np.ndarray, kind: str, name: str) -> np.ndarray:
    """Bytes of a matrix [rows, columns] rounded in the light of its inputs' correlations [columns, columns]."""
    rows, columns = values.shape
    h = moments.copy()
    h[np.diag_indices(columns)] += (EMBEDDING_DAMP if name == "token_embd.weight" else DAMP) * np.mean(np.diag(h))
    inverse = np.linalg.inv(h)
    factor = np.linalg.cholesky((inverse + inverse.T) / 2).T.astype(np.float32)  # upper: row j says how column j's error is made good by later ones
    w, size = values.astype(np.float32).copy(), TYPES[TYPE_IDS[kind]][2]
    out = np.empty((rows, columns // BLOCK, size), np.uint8)
    for b in range(columns // BLOCK):
        lo, hi = b * BLOCK, (b + 1) * BLOCK
        part, errors = w[:, lo:hi].copy(), np.empty((rows, BLOCK), np.float32)
        blocks = quantize(part, TYPE_IDS[kind], name).reshape(rows, size)
        step, offset, points = grid(kind, blocks)
        middles = (points[1:] + points[:-1]) / 2
        codes = np.zeros((rows, BLOCK), np.uint8)
        for j in range(BLOCK):
            s = step[:, j]
            q = np.searchsorted(middles, np.divide(part[:, j] - offset[:, j], s, out=np.zeros(rows, np.float32), where=s != 0))
            codes[:, j] = q
            errors[:, j] = (part[:, j] - (s * points[q] + offset[:, j])) / factor[lo + j, lo + j]
            part[:, j + 1 :] -= errors[:, j : j + 1] * factor[lo + j, lo + j + 1 : hi]
        w[:, hi:] -= errors @ factor[lo:hi, hi:]
        out[:, b] = pack(kind, blocks, codes)
    return out.reshape(-1)


def shrink(model: demo_model.Demo, checkpoint: Checkpoint, ids: torch.Tensor) -> dict[str, tuple[str, np.ndarray]]:
    """Every matrix that a projection or the embedding uses: tensor name -> (type, bytes). The model ends with the rounded values."""
    of = {t.pieces[0].source.name: t for t in checkpoint.targets.values() if not t.dense and t.ne[0] % BLOCK == 0}
    state, out = model.state_dict(), {}

    def fit_all(sums: dict[str, torch.Tensor]) -> None:
        for source in sums.keys() & of.keys():
            t, moments = of[source], sums[source].double().numpy()
            order = np.arange(t.ne[0]) if t.columns is None else t.columns
            out[t.name] = (plan(t.name), fit(matrix(t), moments[np.ix_(order, order)], plan(t.name), t.name))
            state[source].copy_(torch.from_numpy(in_place(t, decoded(*out[t.name], t)).reshape(state[source].shape)))
            print(f"\r{t.name}: {plan(t.name)}" + " " * 20, end="", flush=True)

    walk(model, ids, fit_all)
    print()
    return out


def decoded(kind: str, raw: np.ndarray, t: Target) -> np.ndarray:
    """f32 values [rows, columns] of a tensor's bytes."""
    out = np.empty((t.values // t.ne[0], t.ne[0]), np.float32)
    abi.check(abi.lib().bw24_dequantize(TYPE_IDS[kind], abi.ffi.from_buffer(raw), abi.ffi.cast("float *", abi.ffi.from_buffer(out)), out.size))
    return out


def in_place(t: Target, values: np.ndarray) -> np.ndarray:
    """A tensor's values in the checkpoint's order of rows and columns."""
    rows = np.arange(len(values)) if t.pieces[0].rows is None else t.pieces[0].rows
    out = np.empty_like(values)
    out[np.ix_(rows, np.arange(values.shape[1]) if t.columns is None else t.columns)] = values
    return out


def matrix(t: Target) -> np.ndarray:
    return np.concatenate([t.f32(p, 0, p.count) for p in t.pieces])


# ---- measuring


def with_file(model: demo_model.Demo, checkpoint: Checkpoint, path: Path) -> demo_model.Demo:
    """The model with the matrices that a file holds."""
    state = model.state_dict()
    with open_gguf(path) as file:
        for t in checkpoint.targets.values():
            source = t.pieces[0].source
            if source.rows > 1 and t.change is None:
                values = decoded(file.tensors[t.name].type_name, np.array(file.array(t.name)), t)
                state[source.name].copy_(torch.from_numpy(in_place(t, values).reshape(state[source.name].shape)))
    return model


def measure(model: demo_model.Demo, ids: torch.Tensor, batch: int = 4) -> tuple[list[float], list[float]]:
    """Losses of the trunk and of draft steps 1 to 3 (nats a token), and how often each step's pick is the trunk's."""
    steps = [(batch, demo_model.chain_attention(s, LENGTH, "cpu")) for s in (1, 2, 3)]
    losses, agree, count = np.zeros(4), np.zeros(4), 0
    with torch.no_grad():
        for at in range(0, len(ids) - batch + 1, batch):
            part = ids[at : at + batch]
            tokens, hidden = model.hidden(part[:, :LENGTH])
            picks = None
            for i, h in enumerate([hidden, *model.drafts(tokens, hidden, steps)]):
                logits = model.logits(h[:, 4:])
                losses[i] += torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 5:].flatten()).item()
                picks = logits.argmax(-1) if picks is None else picks
                agree[i] += (logits.argmax(-1) == picks).float().mean().item()
            count += 1
    return (losses / count).round(4).tolist(), (agree / count).round(4).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="folders of source code and documentation")
    parser.add_argument("--sequences", type=int, default=96, help=f"of {LENGTH} tokens, to fit to or to measure on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--measure", action="store_true")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.checkpoint / "tokenizer.json"))
    model, checkpoint = demo_model.load(args.checkpoint), open_checkpoint(args.checkpoint, "keep")
    ids = sequences(tokenizer, args.text, args.sequences, args.seed)
    if args.measure:
        losses, agree = measure(with_file(model, checkpoint, args.file), ids)
        print(f"{args.file.name}: losses {losses}, agreement {agree[1:]}")
        return
    given = shrink(model, checkpoint, ids)
    convert(args.checkpoint, args.file, "keep", name="bw24 demo", given=given)
    print(f"{args.file}: {args.file.stat().st_size} bytes")


if __name__ == "__main__":
    main()
