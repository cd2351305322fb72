"""The gate's drafted replies by class of prompt, and rows judged beyond 4096 positions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from bw24 import gate_prompts, gate_spec
from bw24.engine import Engine
from bw24.gate_spec import DEPTHS, SAMPLERS, Speculation
from bw24.gguf import open_gguf
from bw24.gguf_writer import GGUFWriter
from bw24.source import Model, open_model

TINY = Path(__file__).parent / "fixtures" / "tiny" / "qwen35moe.gguf"
BEYOND = 4200


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """The tiny mixture with an MTP block, its context said to be 8192: rotation has no other limit."""
    path = tmp_path_factory.mktemp("long") / "long.gguf"
    with open_gguf(TINY) as file, GGUFWriter(path) as out:
        for key, value in {**file.metadata, "qwen35moe.context_length": 8192}.items():
            out.add(key, value)
        for t in file.tensors.values():
            out.add_tensor(t.name, t.type_name, t.shape, bytes(file.data(t.name)))
        out.write()
    with open_model(path) as model:
        yield model


def arms_of(model: Model, **more: object) -> Speculation:
    return Speculation(lambda **changes: Engine(model, **{"device": "cpu", "threads": 1, "ctx": 5000, **changes}), range(5, 69), **more)


def test_rows_are_judged_beyond_4096_positions(long_model: Model) -> None:
    with closing(arms_of(long_model)) as arms:
        problem, detail = arms.judged(BEYOND)
    assert problem is None and detail == f"steps of 2..9 rows after {BEYOND} tokens, bit-equal"


def test_every_class_has_an_arm_for_every_depth(long_model: Model) -> None:
    classes = {kind: long_model.tokenizer.encode(text)[:40] for kind, text in gate_prompts.CLASSES.items()}
    with closing(arms_of(long_model, classes=classes)) as arms:
        found = {name: arm for name, arm in arms.arms() if any(name.endswith(f", {kind}") for kind in classes)}
        assert len(found) == len(classes) * len(DEPTHS)
        for name in ("drafted K=3 = plain, long agentic", "drafted auto = plain, chat"):
            problem, detail = found[name]()
            assert problem is None and detail.count("32 tokens") == len(SAMPLERS) and detail.startswith("greedy ") and "; seeded " in detail


def test_a_class_whose_rounds_or_text_differ_is_red(long_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(arms_of(long_model, classes={"prose": range(9, 40)})) as arms:
        counts = arms.reply(2, "greedy", "prose")[1]
        seen = {gate_spec.case_of("greedy", "prose"): {2: [*counts[:2], counts[2] + 1]}}
        monkeypatch.setattr(arms, "recorded", lambda: seen)
        assert "recorded are" in (arms.drafted_class(2, "prose")[0] or "")
        seen.clear()
        assert arms.drafted_class(2, "prose")[0] is None
        arms._plain["greedy, prose"][7] += 1
        assert (arms.drafted_class(2, "prose")[0] or "").startswith("greedy: 7 of 32 tokens agree")


def test_the_prompts_are_of_their_lengths(long_model: Model) -> None:
    sizes = {kind: len(text) for kind, text in gate_prompts.CLASSES.items()}
    assert sizes["short code"] < 40 < sizes["prose"] < sizes["medium code"] < sizes["long agentic"] and sizes["long agentic"] > 2000
