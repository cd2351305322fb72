"""What the shipped demo model writes, recorded for its tests: texts of its replies and how many drafts were accepted at each position.

    python scripts/demo_goldens.py CHECKPOINT FILE.gguf OUT.json        # needs torch and safetensors
    python scripts/demo_goldens.py - FILE.gguf OUT.json                 # keeps OUT's ids of the checkpoint: after a changed order of operations

For each prompt: its ids, the likeliest token after each of them by the checkpoint in float32 (torch), the greedy reply of the file by the engine, and
the counts of rounds of three drafts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from bw24.engine import Engine
from bw24.generate import Generation
from bw24.sampling import SamplingParams
from bw24.source import open_model
from bw24.speculate import Drafted

TOKENS, DRAFTS = 48, 3
PROMPTS = {
    "code": 'import json\nfrom pathlib import Path\n\n\ndef load_settings(path, default=None):\n    """Read a JSON file of settings.\n\n',
    "class": "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "prose": "Installation\n============\n\nThe package is installed with pip. It needs Python 3.10 or newer, and it can be",
    "docstring": 'def mean(values, weights=None, axis=None):\n    """\n    Compute the weighted average along an axis.\n\n    Parameters\n'
                 "    ----------\n",
    "chat": "<|im_start|>user\nWrite a Python function `reverse_words`. Return the words of a text in reverse order.<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\n",
    "tests": "import pytest\n\nfrom shop.cart import Cart\n\n\n@pytest.fixture\ndef cart():\n    return Cart()\n\n\n"
             "def test_an_empty_cart_costs_nothing(cart):\n",
}


def checkpoint_ids(checkpoint: Path) -> Callable[[str, list[int]], list[int]]:
    """The likeliest token after each of a prompt's by the checkpoint in float32."""
    import torch

    import demo_model

    model = demo_model.load(checkpoint)

    def likeliest(kind: str, ids: list[int]) -> list[int]:
        with torch.no_grad():
            return model.logits(model.hidden(torch.tensor([ids]))[1])[0].argmax(-1).tolist()

    return likeliest


def kept_ids(out: Path) -> Callable[[str, list[int]], list[int]]:
    """The same as OUT has it; a prompt that is not there with these ids is an error."""
    rows = {row["kind"]: row for row in json.loads(out.read_text(encoding="utf-8"))}

    def likeliest(kind: str, ids: list[int]) -> list[int]:
        if kind not in rows or rows[kind]["ids"] != ids:
            sys.exit(f"{out}: prompt '{kind}' is not there with {len(ids)} ids of this file; name the checkpoint")
        return rows[kind]["likeliest"]

    return likeliest


def main() -> None:
    checkpoint, file, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    likeliest_of = kept_ids(out) if checkpoint == "-" else checkpoint_ids(Path(checkpoint))
    found = []
    with open_model(file) as opened, Engine(opened, device="cpu", draft=True) as engine:
        for kind, text in PROMPTS.items():
            ids = opened.tokenizer.encode(text, parse_special=True)
            likeliest = likeliest_of(kind, ids)
            with closing(Drafted(engine, DRAFTS, SamplingParams(), len(ids) + TOKENS)) as seq:
                made = Generation(seq, opened.tokenizer, ids, seq.prefill(ids, DRAFTS)[-1], SamplingParams(), ctx=engine.ctx, limit=TOKENS,
                                  stop_ids=opened.tokenizer.eog_ids)
                reply = "".join(made)
                stats = seq.stats
            print(f"---- {kind}: {stats.line()}\n{text}{reply}")
            found.append({"kind": kind, "text": text, "ids": ids, "likeliest": likeliest, "reply": made.ids,
                          "reached": stats.reached[:DRAFTS], "accepted": stats.accepted[:DRAFTS]})
    rows = ",\n".join(json.dumps(row) for row in found)
    out.write_text(f"[\n{rows}\n]\n")


if __name__ == "__main__":
    main()
