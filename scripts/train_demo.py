"""Trains the demo model on one GPU for a given time and writes it as a checkpoint directory.

    python scripts/demo_text.py DATA                          # text of this machine, minutes on many cores
    python scripts/train_demo.py DATA OUT --budget 580        # config.json, model.safetensors, tokenizer files in OUT

Loss: next token by the trunk, plus 0.3, 0.2 and 0.1 times the loss of draft steps 1, 2 and 3. Steps 2 and 3 are fed with the block's own output, as
in drafting, on a half and a quarter of the batch. Muon for the matrices, AdamW for everything else; the rates fall to zero over the last 30 % of the
time; the weights written are a moving average. The budget counts from the program's start; half-way through it OUT holds a first, unfinished model.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import demo_model
from demo_model import CONFIG, Attend, Demo
from demo_text import CONTROL, MARKS

WEIGHTS = (1.0, 0.3, 0.2, 0.1)  # of the trunk's and the draft steps' losses
BEGAN = time.monotonic()
EXPORT_SECONDS = 10  # of the budget, for writing
FALL = 0.3  # share of the time over which the rates fall to zero
AVERAGE = 0.998
EMBEDDING_STD = 0.2  # large enough to survive beside what the first blocks add to the stream
CHAT_TEMPLATE = Path(__file__).parent / "demo_chat.jinja"


class Windows:
    """Batches of `rows` + 1 tokens without replacement: half of the sequences begin with a document, half anywhere."""

    def __init__(self, folder: Path, rows: int, batch: int, device: torch.device):
        self.tokens = torch.from_numpy(np.fromfile(folder / "tokens.bin", np.uint16).astype(np.int32)).to(device)
        self.last = len(self.tokens) - rows - 1
        starts = np.load(folder / "starts.npy")
        self.rows, self.batch, self.rng = rows, batch, np.random.default_rng(0)
        self.kinds = [self._deal(lambda: starts[starts < self.last]),
                      self._deal(lambda: np.arange(self.rng.integers(min(rows, self.last)), self.last, rows))]
        self.span = torch.arange(rows + 1, device=device)

    def _deal(self, new) -> Iterator[int]:
        while True:
            yield from self.rng.permutation(new())

    def next(self) -> Tensor:
        at = [next(self.kinds[i % 2]) for i in range(self.batch)]
        return self.tokens[torch.as_tensor(at, device=self.span.device)[:, None] + self.span].long()


class Muon:
    """Momentum whose matrix updates are made orthogonal by five steps of a quintic iteration."""

    def __init__(self, params: list[Tensor], decay: float = 0.1):
        self.decay = decay
        shapes: dict[tuple[int, int], list[Tensor]] = {}
        for p in params:
            shapes.setdefault((min(p.shape), max(p.shape)), []).append(p)
        self.groups = [(ps, [torch.zeros_like(p) for p in ps]) for ps in shapes.values()]

    @torch.no_grad()
    def step(self, rate: float, momentum: float) -> None:
        for params, moving in self.groups:
            grads = [p.grad for p in params]
            torch._foreach_lerp_(moving, grads, 1 - momentum)
            ahead = torch._foreach_lerp(grads, moving, momentum)
            x = torch.stack([g if g.shape[0] <= g.shape[1] else g.mT for g in ahead])
            x = x.bfloat16() if x.is_cuda else x
            x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
            for _ in range(5):
                a = x @ x.mT
                x = 3.4445 * x + (2.0315 * a @ a - 4.775 * a) @ x
            torch._foreach_mul_(params, 1 - rate * self.decay)
            for p, u in zip(params, x.float(), strict=True):
                p.add_(u if p.shape[0] <= p.shape[1] else u.mT, alpha=-rate * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)


def token_loss(embedding: Tensor, hidden: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, embedding.to(hidden.dtype)).float().flatten(0, 1), targets.flatten())


def losses(model: Demo, window: Tensor, attends: list[Attend], dtype: torch.dtype) -> list[Tensor]:
    """Losses of the trunk and of three draft steps."""
    ids, targets = window[:, :-1], window[:, 1:]
    batch = len(ids)
    tokens, hidden = model.hidden(ids, dtype)
    counts = [batch, max(1, batch // 2), max(1, batch // 4)]
    drafts = model.drafts(tokens, hidden, list(zip(counts, attends, strict=True)))
    return [token_loss(model.model.embed_tokens.weight, h, targets[: len(h)]) for h in (hidden, *drafts)]


def prepare(device: torch.device) -> tuple[Demo, list[Tensor], list[Tensor], list[Tensor]]:
    """A new model and its parameters: matrices, embedding, the rest."""
    torch.manual_seed(0)
    model = Demo()
    model.model.embed_tokens.weight.data.normal_(std=EMBEDDING_STD)
    for norm in (model.model.norm, model.mtp.norm):  # so that the tied head's logits begin near zero
        norm.weight.data.fill_(0.02 / EMBEDDING_STD - 1)
    model.to(device)
    embedding = [model.model.embed_tokens.weight]
    matrices = [p for p in model.parameters() if p.dim() == 2 and min(p.shape) >= 64 and p is not embedding[0]]
    taken = {id(p) for p in embedding + matrices}
    return model, matrices, embedding, [p for p in model.parameters() if id(p) not in taken]


def compile_parts(on: bool) -> None:
    """Compiles what is elementwise or nearly so; False puts the plain functions back."""
    global token_loss
    for owner, name in ((demo_model, "delta_system"), (demo_model, "delta_affine"), (demo_model.Block, "rest"), (demo_model.DeltaNet, "inputs"),
                        (demo_model.DeltaNet, "outputs"), (demo_model.Scale, "forward")):
        plain = getattr(getattr(owner, name), "plain", getattr(owner, name))
        setattr(owner, name, keep_plain(plain) if on else plain)
    plain = getattr(token_loss, "plain", token_loss)
    token_loss = keep_plain(plain) if on else plain


def keep_plain(plain: Callable) -> Callable:
    fast = torch.compile(plain, dynamic=False)

    def call(*args: object) -> object:
        return fast(*args)

    call.plain = plain
    return call


def first_step(model: Demo, window: Tensor, attends: list[Attend], dtype: torch.dtype, device: torch.device) -> None:
    """Compiles, on a GPU, before the clock of the rates starts; without a working compiler the plain functions do."""
    try:
        if device.type == "cuda":
            torch.set_float32_matmul_precision("high")
            torch._dynamo.config.recompile_limit = 64
            compile_parts(True)
        total_loss(losses(model, window, attends, dtype)).backward()
    except Exception as error:
        if device.type != "cuda":
            raise
        print(f"not compiled: {type(error).__name__}: {str(error)[:300]}", flush=True)
        compile_parts(False)
        model.zero_grad()
        total_loss(losses(model, window, attends, dtype)).backward()
    model.zero_grad()


def total_loss(found: list[Tensor]) -> Tensor:
    return sum(w * x for w, x in zip(WEIGHTS, found, strict=True))


class Average:
    """A moving average of the parameters, which can stand in for them."""

    def __init__(self, params: list[Tensor]):
        self.params, self.values = params, [p.detach().clone() for p in params]

    def add(self, step: int) -> None:
        torch._foreach_lerp_(self.values, [p.detach() for p in self.params], 1 - min(AVERAGE, (1 + step) / (10 + step)))

    @torch.no_grad()
    def swap(self) -> None:
        for p, a in zip(self.params, self.values, strict=True):
            kept = p.detach().clone()
            p.copy_(a)
            a.copy_(kept)


class Log:
    """Mean losses since the last line, printed every few seconds."""

    def __init__(self, device: torch.device, every: float = 10):
        self.began, self.every, self.sum, self.steps, self.rows = time.monotonic(), every, torch.zeros(4, device=device), 0, []
        self.last = self.began

    def add(self, step: int, found: list[Tensor], tokens: int) -> None:
        self.sum += torch.stack([x.detach() for x in found])
        self.steps += 1
        now = time.monotonic()
        if now - self.last < self.every:
            return
        mean = (self.sum / self.steps).cpu().numpy().round(4).tolist()
        now = time.monotonic()
        self.rows.append([step, round(now - self.began, 1), *mean])
        print(f"step {step}, {self.rows[-1][1]} s, losses {mean}, {self.steps * tokens / (now - self.last) / 1e3:.0f}k tokens/s", flush=True)
        if not np.isfinite(mean).all():
            raise SystemExit("the loss is not finite: lower --rate")
        self.sum, self.steps, self.last = torch.zeros_like(self.sum), 0, now


def train(data: Windows, end: float, steps: int | None, rate: float, device: torch.device,
          middle: Callable[[Demo], None]) -> tuple[Demo, dict[str, object]]:
    """The trained model with averaged weights, and what was measured. Ends at `end` of the monotonic clock; calls `middle` half-way."""
    model, matrices, embedding, small = prepare(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    attends = [demo_model.chain_attention(s, data.rows, device) for s in (1, 2, 3)]
    muon = Muon(matrices)
    groups = [{"params": embedding, "base": 0.012}, {"params": small, "base": 0.004}]
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
    first_step(model, data.next(), attends, dtype, device)
    average, log, step, saved = Average(list(model.parameters())), Log(device), 0, False
    print(f"ready; {end - log.began:.0f} s to go", flush=True)
    while (done := step / steps if steps else (time.monotonic() - log.began) / (end - log.began)) < 1:
        scale = max(0.01, min(1.0, (step + 1) / 100, (1 - done) / FALL))
        found = losses(model, data.next(), attends, dtype)
        total_loss(found).backward()
        torch.nn.utils.clip_grad_norm_(embedding + small, 1.0)
        for g in adam.param_groups:
            g["lr"] = g["base"] * scale
        muon.step(rate * scale, min(0.95, 0.85 + step / 3000))
        adam.step()
        model.zero_grad()
        step += 1
        average.add(step)
        log.add(step, found, data.batch * data.rows)
        if done > 0.5 and not saved:
            saved = True
            average.swap()
            middle(model)
            average.swap()
    average.swap()
    report = {"steps": step, "tokens": step * data.batch * data.rows, "seconds": round(time.monotonic() - log.began, 1), "history": log.rows}
    return model, report


# ---- export


def export(model: Demo, data: Path, out: Path) -> None:
    """The checkpoint directory: BF16 but for A_log and the gated norm, whose values are rounded to BF16 all the same."""
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    state = {}
    for name, t in model.state_dict().items():
        rounded = t.detach().cpu().bfloat16().contiguous()
        state[name] = rounded.float() if name.endswith(("A_log", "linear_attn.norm.weight")) else rounded
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    shutil.copyfile(data / "tokenizer.json", out / "tokenizer.json")
    added = {t["content"]: t["id"] for t in json.loads((data / "tokenizer.json").read_text())["added_tokens"]}
    end, stop = added[CONTROL[0]], added[CONTROL[2]]
    every = CONFIG["full_attention_interval"]
    kinds = ["full_attention" if i % every == every - 1 else "linear_attention" for i in range(CONFIG["num_hidden_layers"])]
    files = {
        "config.json": {**CONFIG, "layer_types": kinds, "eos_token_id": end, "pad_token_id": end, "bos_token_id": None},
        "generation_config.json": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "eos_token_id": [stop, end]},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False, "bos_token": None, "eos_token": CONTROL[2], "pad_token": CONTROL[0],
            "model_max_length": CONFIG["max_position_embeddings"], "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE.read_text(),
            "added_tokens_decoder": {str(i): {"content": t, "special": t in CONTROL, "normalized": False, "lstrip": False, "rstrip": False,
                                              "single_word": False} for t, i in added.items() if t in CONTROL + MARKS},
        },
    }
    for name, value in files.items():
        (out / name).write_text(json.dumps(value, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="the folder that demo_text.py wrote")
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget", type=float, default=580, help="seconds from the program's start to its end")
    parser.add_argument("--steps", type=int, help="instead of a time")
    parser.add_argument("--rows", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=32, help="sequences of a step")
    parser.add_argument("--rate", type=float, default=0.015, help="Muon's")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    device, data = torch.device(args.device), Windows(args.data, args.rows, args.batch, torch.device(args.device))
    print(f"{len(data.tokens) / 1e6:.1f} M tokens", flush=True)
    model, report = train(data, BEGAN + args.budget - EXPORT_SECONDS, args.steps, args.rate, device, lambda m: export(m, args.data, args.out))
    export(model, args.data, args.out)
    (args.out / "training.json").write_text(json.dumps(report) + "\n")
    print(f"{report['steps']} steps, {report['tokens'] / 1e6:.1f} M tokens in {report['seconds']} s; written to {args.out}")


if __name__ == "__main__":
    main()
