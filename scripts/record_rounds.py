"""Writes py/bw24/gate_counts.py: the rounds of the gate's replies with the packaged demo model. Run it after a change of that file, or of the rounds
themselves, and say why in the commit.

    python scripts/record_rounds.py
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from pathlib import Path

from bw24.cli_check import GATE_ROWS, gate_classes, gate_ids
from bw24.engine import Engine
from bw24.gate_spec import FULL_TOKENS, SAMPLERS, TOKENS, Speculation, case_of
from bw24.models import DEMO_MODEL, resolve
from bw24.source import open_model

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "py" / "bw24" / "gate_counts.py"


def main() -> None:
    path = resolve(DEMO_MODEL).path
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    head = OUT.read_text(encoding="utf-8").split("RECORDED:")[0]
    lines = ["RECORDED: dict[tuple[str, int], dict[str, dict[int, list[int]]]] = {"]
    with open_model(path) as model:
        ids = gate_ids(model, model.builder.rows("token_embd.weight"), min(GATE_ROWS, model.context_length - 33))
        for tokens in (TOKENS, FULL_TOKENS):
            full = tokens == FULL_TOKENS
            classes = gate_classes(model) if full else {}
            lines.append(f'    ("{digest}", {tokens}): {{')
            with contextlib.closing(Speculation(lambda **changes: Engine(model, device="cpu", **changes), ids, full, classes)) as arms:
                for kind, sampler in itertools.product(("", *classes), SAMPLERS):
                    lines.append(f'        "{case_of(sampler, kind)}": {{')
                    lines += [f"            {k}: {arms.reply(k, sampler, kind)[1]}," for k in range(1, 9)]
                    lines.append("        },")
            lines.append("    },")
    OUT.write_text(head + "\n".join([*lines, "}"]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
