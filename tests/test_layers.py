"""Layer by layer against transformers: what each layer of a tiny random checkpoint hands on, in float arithmetic; and wrong lists that must show.

A list cut before a layer's first op, with the trunk's own end put behind it, hands on the residual stream as its hidden rows.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from bw24 import source
from bw24.engine import Engine
from st_files import FAMILIES, needs

LIMIT = 1e-4  # of the largest value


def cut_before(text: str, layer: int) -> str:
    """The list without the layers from `layer` on."""
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if f"=blk.{layer}." in line)
    if "w=" in lines[first] and lines[first].startswith("LINEAR"):
        raise AssertionError("a layer begins with its norm")
    end = next(i for i, line in enumerate(lines) if line.startswith("SCALE") and "y=hidden" in line)
    return "\n".join([*lines[:first], "PICK_ROWS y=x_want x=x", *lines[end:]]) + "\n"


def hidden_rows(folder: Path, ids: list[int], layer: int | None, edit=lambda text: text) -> np.ndarray:
    """What layer `layer` hands on (None: the last), [n, width] f32, the residual stream before the final norm."""
    with source.open_model(folder) as model:
        text = edit(model.list_text(True))
        model.list_text = lambda pre_norm=False: text if layer is None else cut_before(text, layer + 1)
        with Engine(model, backend="ref", kv="f32", float_activations=True) as engine, engine.sequence() as seq:
            return engine.step_hidden([(seq, token, True) for token in ids], logits=False)[1]


def differences(folder: Path, edit=lambda text: text) -> list[float]:
    """Of each layer but the last: the largest difference from transformers', relative to the largest value."""
    want = np.load(folder / "expected.npz")
    rows, ids = want["hidden"], want["ids"].tolist()
    got = [hidden_rows(folder, ids, layer, edit)[-rows.shape[1] :] for layer in range(len(rows))]
    return [float(np.abs(g - w).max() / np.abs(w).max()) for g, w in zip(got, rows, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_each_layer_s_rows_are_those_of_transformers(family):
    folder = needs(family)
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    found = differences(folder)
    assert len(found) == layers - 1 and all(d <= LIMIT for d in found), found


def rope_first(text: str) -> str:
    """q and k rotated before their norms."""
    lines = text.splitlines()
    at = {kind: [i for i, line in enumerate(lines) if re.match(rf"{kind} .*?\bx=[qk]\d*\b", line)] for kind in ("NORM", "ROPE")}
    assert at["NORM"] and len(at["NORM"]) == len(at["ROPE"])
    for norm, rope in zip(at["NORM"], at["ROPE"], strict=True):
        lines[norm], lines[rope] = lines[rope], lines[norm]
    return "\n".join(lines) + "\n"


def bias_first(text: str) -> str:
    """The selection bias added to the router's logits, so that it goes into the weights too."""
    pattern = r"^(LINEAR +y=router\S* x=\S+ w=\S+ffn_gate_inp\.weight)(\n|.*?\n)(ROUTE .*?) b=(\S+)"
    out, changed = re.subn(pattern, r"\1 b=\4\2\3", text, flags=re.M)
    assert changed
    return out


def swapped_key(text: str) -> str:
    """The latent before the rotated part of the key, though the rotation takes the first values."""
    return re.sub(r"^CONCAT y=k a=(\S+) b=(\S+)", r"CONCAT y=k a=\2 b=\1", text, flags=re.M)


DEEPSEEK = ("deepseek_v2", "deepseek_v3")
WRONG = {
    "the key's parts in the other order": (DEEPSEEK, swapped_key),
    "pairs of the other style": (DEEPSEEK, lambda text: text.replace("style=norm", "style=neox")),
    "frequencies not stretched": (DEEPSEEK, lambda text: text.replace(" ff=yarn.factors", "")),
    "the score's growth left out": (DEEPSEEK, lambda text: re.sub(r"^(ATTEND .*) scale=\S+", rf"\1 scale={20**-0.5}", text, flags=re.M)),
    "values from the key's beginning": (DEEPSEEK, lambda text: re.sub(r"^(PERHEAD .*) from=8", r"\1 from=0", text, flags=re.M)),
    "rope before the norm": (("qwen3", "qwen3_moe", "gemma3", "hy_v3"), rope_first),
    "bias in the weights": (("minimax_m2", "hy_v3", "deepseek_v3"), bias_first),
    "routed scale left out": (("hy_v3", *DEEPSEEK), lambda text: re.sub(r"^(ROUTE .*) scale=\S+", r"\1 scale=1", text, flags=re.M)),
    "heads in the other order": (("qwen3_5", "qwen3_5_moe"), lambda text: text.replace("order=tiled", "order=grouped")),
    "gate of the attention left out": (("qwen3_5",), lambda text: re.sub(r"^GATE .*y=att.*\n", "", text, flags=re.M)),
    "one key fewer in the window": (("gemma3", "gemma4"), lambda text: text.replace("window=8", "window=7")),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_list_shows(fault):
    families, edit = WRONG[fault]
    for family in families:
        assert max([*differences(needs(family), edit), last_difference(needs(family), edit)]) > 10 * LIMIT, family


def last_difference(folder: Path, edit) -> float:
    """Of the last layer's rows, from those of the right list, which the logits' test holds to transformers'."""
    ids = np.load(folder / "expected.npz")["ids"].tolist()
    right, wrong = hidden_rows(folder, ids, None), hidden_rows(folder, ids, None, edit)
    return float(np.abs(wrong - right).max() / np.abs(right).max())


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_itself_agrees(family, tmp_path):
    """The recorded values are what the installed transformers computes, where there is one."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder = needs(family)
    kind = json.loads((folder / "config.json").read_text())["architectures"][0]
    if not hasattr(transformers, kind):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    want = np.load(folder / "expected.npz")
    with torch.no_grad():
        out = model(torch.tensor(want["ids"][None].astype(np.int64)), use_cache=False, output_hidden_states=True)
    got = out.logits[0, -len(want["logits"]) :].numpy()
    assert np.abs(got - want["logits"]).max() <= LIMIT * np.abs(want["logits"]).max()
