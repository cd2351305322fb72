"""Real models against llama.cpp's numbers (goldens/real): needs BW24_GOLDENS and BW24_TEST_MODELS, a folder with the two files.

The yardstick f32w is the same file with weights dequantised and float activations. Only its 64 best logits a position are stored, so ref's
float-activation mode is first held against those, then serves as f32w for the error over all logits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from bw24.engine import Engine
from bw24.source import open_model

ROOT = Path(__file__).resolve().parent.parent
FILES = {"smollm2": "smollm2-135m-instruct-q4_1.gguf", "gemma3": "gemma-3-270m-q4_k_m.gguf"}
PROMPTS = ("prose", "code", "chat", "multi")
SHORT, LONG = 1e-3, 5e-3  # largest difference from f32w of a float32 engine
POOLED = 1.05  # our RMS error over llama.cpp's own, all prompts together
NLL = 0.005  # mean NLL, default KV against KV f32: of `long` and LICENSE, some 3000 tokens (of `long` alone it errs by 0.0035)
WIDTH = 64


def lse(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    top = x.max(axis=1)
    return top + np.log(np.exp(x - top[:, None]).sum(axis=1))


@dataclass
class Figures:
    """What one model's prompts gave. Errors are differences from f32w's stored figures; squares are of the integer path, ours and llama.cpp's."""

    top: dict[str, float] = field(default_factory=dict)
    lse: dict[str, float] = field(default_factory=dict)
    greedy: dict[str, int] = field(default_factory=dict)
    ours: float = 0.0
    theirs: float = 0.0
    nll: dict[str, float] = field(default_factory=dict)
    nll_diff: float = 0.0

    def add_squares(self, found: np.ndarray, f32w: np.ndarray, their_rms: float) -> None:
        self.ours += ((found.astype(np.float64) - f32w) ** 2).sum()
        self.theirs += their_rms**2 * found.size

    @property
    def pooled(self) -> float:
        """Our RMS error over llama.cpp's."""
        return (self.ours / self.theirs) ** 0.5


def best(logits: np.ndarray, ids: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(np.take_along_axis(logits, ids, axis=1) - want).max())


def short_prompts(out: Figures, z, floats: Engine, ints: Engine) -> None:
    """The prompt and the first 63 greedy ids in one pass: row n-1+i must pick greedy id i."""
    for p in PROMPTS:
        ids, greedy = z[f"{p}_tokens"].tolist(), z[f"{p}_f32w_greedy"]
        n = len(ids)
        with floats.sequence() as a, ints.sequence() as b:
            f32w = a.prefill(ids + greedy.tolist()[:-1], "all")
            found = b.prefill(ids, "all")
        out.top[p] = best(f32w[:n], z[f"{p}_f32w_top_ids"], z[f"{p}_f32w_top_logits"])
        out.lse[p] = float(np.abs(lse(f32w[:n]) - z[f"{p}_f32w_lse"]).max())
        out.greedy[p] = int((f32w[n - 1 :].argmax(axis=1) == greedy).sum())
        out.add_squares(found, f32w[:n], z[f"{p}_noise_default_vs_f32w"][2])


def losses(logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """NLL of each of `ids` but the first, from the logits of all."""
    return (lse(logits) - np.pad(logits[np.arange(len(ids) - 1), ids[1:]], (0, 1)))[:-1]


def license_nll(model, engines: dict[str, Engine], piece: int = 700) -> dict[str, np.ndarray]:
    """NLL of LICENSE's tokens in pieces of their own, by engine."""
    ids = model.tokenizer.encode((ROOT / "LICENSE").read_text(), add_special=False)
    bos = [model.tokenizer.bos_id] if model.tokenizer.adds_bos else []
    found: dict[str, list[np.ndarray]] = {name: [] for name in engines}
    for at in range(0, len(ids), piece):
        part = bos + ids[at : at + piece]
        for name, engine in engines.items():
            with engine.sequence() as seq:
                logits = [seq.prefill(part[i : i + WIDTH], "all") for i in range(0, len(part), WIDTH)]
            found[name].append(losses(np.concatenate(logits), np.array(part)))
    return {name: np.concatenate(v) for name, v in found.items()}


def long_prompt(out: Figures, z, model, engines: dict[str, Engine]) -> None:
    ids, nll = z["long_tokens"], {name: [] for name in engines}
    seqs = {name: e.sequence() for name, e in engines.items()}
    last, top = len(ids) - len(z["long_f32w_last32_top_ids"]), []
    for at in range(0, len(ids), WIDTH):
        part = ids[at : at + WIDTH]
        logits = {name: s.prefill(part.tolist(), "all") for name, s in seqs.items()}
        for name, x in logits.items():
            following = ids[at + 1 : at + 1 + len(part)]
            nll[name].append((lse(x) - np.pad(x[np.arange(len(following)), following], (0, len(part) - len(following))))[: len(following)])
        out.add_squares(logits["ints"], logits["floats"], z["long_noise_default_vs_f32w"][2])
        rows = np.arange(max(at, last), at + len(part))
        if len(rows):
            wanted = rows - last
            top.append(best(logits["floats"][rows - at], z["long_f32w_last32_top_ids"][wanted], z["long_f32w_last32_top_logits"][wanted]))
    out.top["long"] = max(top)
    joined = {name: np.concatenate(v) for name, v in nll.items()}
    more = license_nll(model, {name: e for name, e in engines.items() if name != "floats"})
    out.nll = {name: float(np.concatenate([joined[name], v]).mean()) for name, v in more.items()}
    out.nll_diff = float(np.abs(joined["floats"] - z["long_f32w_nll"]).max())


@pytest.fixture(scope="module", params=FILES)
def figures(request, goldens, test_models) -> Figures:
    path = test_models / FILES[request.param]
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    out, settings = Figures(), {"ctx": 2048, "max_rows": 256}
    with np.load(goldens / "real" / f"logits_{request.param}.npz", allow_pickle=False) as z, open_model(path) as model, \
            Engine(model, backend="ref", kv="f32", float_activations=True, **settings) as floats, \
            Engine(model, kv="f32", **settings) as ints, Engine(model, **settings) as default:
        short_prompts(out, z, floats, ints)
        long_prompt(out, z, model, {"floats": floats, "ints": ints, "default": default})
    print(f"\n{request.param}: {out}\npooled RMS over llama.cpp's: {out.pooled:.3f}")
    return out


def test_float_activations_agree_with_f32w(figures):
    for p in PROMPTS:
        assert figures.top[p] <= SHORT and figures.lse[p] <= SHORT, p
    assert figures.top["long"] <= LONG and figures.nll_diff <= LONG


def test_greedy_ids_are_f32w_s(figures):
    assert figures.greedy == dict.fromkeys(PROMPTS, 64)


def test_the_integer_path_errs_no_more_than_llama_cpp(figures):
    assert figures.pooled <= POOLED, figures.pooled


def test_the_default_kv_costs_no_likelihood(figures):
    assert abs(figures.nll["default"] - figures.nll["ints"]) <= NLL, figures.nll
