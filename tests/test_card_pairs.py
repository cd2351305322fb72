"""scripts/card_pairs.py: a row of a model beside llama-bench (here a stand-in that prints its JSON), and what it says where a side fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FAKE = """#!{python}
import json, sys
n = int(sys.argv[sys.argv.index("-r") + 1])
for prompt, gen, rate in ((2048, 0, 1000.0), (0, 128, 50.0)):
    print(json.dumps({{"n_prompt": prompt, "n_gen": gen, "build_number": 7, "backends": "X", "samples_ts": [rate] * n}}))
"""


def pairs(tmp_path: Path, text: str) -> dict:
    """The row of the tiny shape beside a llama-bench of this text."""
    peer = tmp_path / "llama-bench"
    peer.write_text(text)
    peer.chmod(0o755)
    words = [sys.executable, str(ROOT / "scripts" / "card_pairs.py"), "tiny:Q4_K", "--peer-bin", str(tmp_path), "--dir", str(tmp_path),
             "--machine", "here"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    assert not list(tmp_path.glob("*.gguf")), "the model is removed after"
    return json.loads(done.stdout)


def test_a_row_has_both_sides_of_every_cell(tmp_path):
    row = pairs(tmp_path, FAKE.format(python=sys.executable))
    assert row["gate"]["match"] and row["machine"] == "here" and "tiny --type Q4_K" in row["weights"]
    assert [(c["kind"], c["tokens"]) for c in row["cells"]] == [("prefill", 2048), ("decode", 128)]
    for cell, rate in zip(row["cells"], (1000.0, 50.0), strict=True):
        assert cell["peer"]["samples"] == [rate] * 10 and len(cell["ours"]["samples"]) == 10
        assert cell["ratio"] == cell["ours"]["median"] / rate and cell["pair_low"] <= cell["ratio"] <= cell["pair_high"]


def test_a_side_that_fails_leaves_no_ratio_but_its_words(tmp_path):
    row = pairs(tmp_path, f"#!{sys.executable}\nimport sys\nsys.exit('out of memory')\n")
    assert row["cells"] == [] and row["decode_ratio"] is None
    assert row["errors"] == ["llama-bench: out of memory"]
