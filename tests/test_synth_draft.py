"""Random-weight drafters: each kind belongs to its shape's models, drafts with a cut head, and leaves the text as it is; the bench of rounds."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import spec_bench
import synth_draft
import synth_model
from bw24.drafter import open_draft
from bw24.errors import Bw24Error
from bw24.source import open_model


def shape(name: str) -> synth_model.Shape:
    """A shape cut to a small vocabulary and few layers."""
    s = synth_model.SHAPES[name]
    if s.family == "gemma4":
        extra = {**s.extra, "window": 64, **({"experts": 16, "top": 4, "expert_ff": 64} if s.extra["experts"] else {})}
        return replace(s, vocab=700, dim=256, layers=6, ff=256, heads=4, kv_heads=2, context=512, extra=extra)
    extra = {**s.extra, "state": 64, "k_heads": 2, "v_heads": 4, **({"experts": 16, "top": 4, "expert_ff": 64} if "experts" in s.extra else {})}
    return replace(s, vocab=700, dim=256, layers=4, ff=256, heads=4, kv_heads=2, head_dim=64, context=512, extra={**extra, "rotary": 32})


@pytest.mark.parametrize("name", ["qwen3.5-9b", "qwen3.6-35b-a3b", "gemma4-26b-a4b", "gemma4-e4b"])
def test_a_drafter_of_each_kind(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    small, model, draft, out = shape(name), tmp_path / "m.gguf", tmp_path / "d.gguf", tmp_path / "o.jsonl"
    synth_model.write_model(model, name, small, "NVFP4" if name == "qwen3.5-9b" else "Q4_K", head="Q4_K")
    synth_draft.write_draft(draft, name, small, rows=512)
    with open_model(model) as m:
        found = open_draft(draft, m)
        assert found.trimmed and len(found.ids) == 512 and found.builder.rows(next(n for n in ("output.weight", "token_embd.weight")
                                                                                 if n in found.names)) == 512
        found.close()
    cells = ["--cells", "2:0.8,auto:0.3", "--prompt", "40", "--tokens", "40", "--pairs", "1"]
    assert spec_bench.main([str(model), "--draft", str(draft), "--device", "cpu", *cells, "-o", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["k"] for r in rows] == [2, "auto"] and all(r["synthetic"] and r["tokens"] == 40 for r in rows)
    assert rows[0]["drafted"] >= 2 * (rows[0]["rounds"] - 1) > 20 and 0.5 < rows[0]["acceptance_by_position"][0] < 1
    assert "MISMATCH" not in capsys.readouterr().out


def test_families_without_a_drafter_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Bw24Error, match="family qwen3 has no MTP block here"):
        synth_draft.write_draft(tmp_path / "d.gguf", "tiny", synth_model.SHAPES["tiny"])
