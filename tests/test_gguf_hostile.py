"""Hostile GGUF files: each must be refused by a message that names the culprit, quickly and in little memory; none may crash."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import time
from pathlib import Path

import pytest

from bw24.errors import Bw24Error
from bw24.gguf import MAX_ALIGNMENT, GGUFWriter, open_gguf, parse_header
from fuzz_gguf import BytesSource, fuzz

HOSTILE = Path(__file__).parent / "fixtures" / "hostile"
CASES = json.loads((HOSTILE / "expected.json").read_text())
# what a message must contain: the key or tensor at fault, or for the header itself the fact
NAMED = {
    "empty": "24 bytes", "trunc-magic": "24 bytes", "trunc-header": "24 bytes", "trunc-kv": "metadata keys", "trunc-infos": "tensor 6",
    "trunc-data": "blk.0.ffn_down.weight", "magic-bad": "magic", "version-0": "version 0", "version-1": "version 1",
    "version-99": "version 99", "count-tensors-2e63": "9223372036854775808 tensors", "count-tensors-2e40": "1099511627776 tensors",
    "count-kv-2e62": "4611686018427387904", "count-kv-plus1": "tensor 0", "string-key-2e62": "metadata key 0",
    "string-value-2e62": "general.name", "string-value-1gib": "general.name", "array-count-2e61": "x.y", "array-strings-2e40": "x.y",
    "array-nested": "x.y", "array-nested-240": "x.y", "array-bad-elem-type": "x.y", "kv-type-13": "x.y", "kv-type-ffffffff": "x.y",
    "key-empty": "key 16", "key-duplicate": "llama.block_count", "key-nul-alias": "llama.block_count",
    "tensor-duplicate": "blk.0.attn_q.weight", "tensor-name-empty": "tensor 11", "tensor-name-64": "nnnnnnnn",
    "tensor-name-nul": "blk.0.attn_q.weight", "tensor-name-path": "etc/pwn", "tensor-name-not-utf8": "tensor 11",
    "dims-5": "token_embd.weight", "dims-ffffffff": "token_embd.weight", "dim-0": "blk.0.attn_q.weight",
    "dim-negative": "blk.0.attn_q.weight", "dims-overflow-2e64": "token_embd.weight", "dims-overflow-wrap4": "token_embd.weight",
    "dims-overflow-hidden0": "tensor z", "dims-bytes-overflow": "token_embd.weight", "offset-beyond": "blk.0.ffn_down.weight",
    "offset-wrap": "blk.0.ffn_down.weight", "offset-unaligned": "blk.0.ffn_down.weight", "offset-overlap": "token_embd.weight",
    "align-0": "general.alignment", "align-3": "general.alignment", "align-2e31": "general.alignment", "align-string": "general.alignment",
    "type-43": "type 43", "type-removed-4": "type 4", "type-ffffffff": "type 4294967295", "block-q4k-ne0-8": "blk.0.attn_q.weight",
    "block-q8-by-product": "blk.0.attn_q.weight", "big-endian": "big-endian",
}


class Watch:
    """Bounds the CPU time and the peak memory of a block."""

    def __init__(self, seconds: float = 0.1, growth: int = 50 << 20):
        self.seconds, self.growth = seconds, growth

    def __enter__(self):
        self.memory, self.start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()

    def __exit__(self, *_):
        assert time.thread_time() - self.start < self.seconds
        assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - self.memory) * 1024 < self.growth


def load_semantic(path: Path) -> None:
    """Open a file as a model and evaluate seven tokens: metadata, vocabulary, shapes, weights, list, chat template, one prefill."""
    from bw24.engine import Engine
    from bw24.source import open_model

    with open_model(path) as model:
        assert model.tokenizer and (model.chat_template is None or model.chat_template)
        with Engine(model, backend="ref", threads=1, ctx=32) as engine, engine.sequence() as sequence:
            sequence.prefill([1, 3, 4, 5, 3, 4, 5])


def assert_one_safe_line(message: str) -> None:
    assert message.isprintable() and message.isascii() and len(message) < 1000, ascii(message)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["file"])
def test_container(case):
    path, fds = HOSTILE / case["file"], len(os.listdir("/proc/self/fd"))
    refused = None
    with Watch():
        try:
            open_gguf(path).close()
        except Bw24Error as error:
            refused = str(error)
    assert len(os.listdir("/proc/self/fd")) == fds
    if refused:
        assert_one_safe_line(refused)
    if case["layer"] == "container" and case["expect"] == "reject":
        assert refused and NAMED[Path(case["file"]).stem] in refused.removeprefix(str(path)), refused
    if case["expect"] == "accept":
        assert refused is None


def test_the_set_is_complete():
    assert len(CASES) == 85 and {c["file"] for c in CASES} == {p.name for p in HOSTILE.glob("*.gguf")}


@pytest.mark.skipif(importlib.util.find_spec("bw24.source") is None, reason="this build has no model loader")
@pytest.mark.parametrize("case", [c for c in CASES if c["layer"] != "container" or c["file"] == "ok-minimal.gguf"], ids=lambda c: c["file"])
def test_model_loader(case):
    import bw24.engine  # noqa: F401 (its import is not part of the time measured)

    refused = None
    with Watch(seconds=0.5):
        try:
            load_semantic(HOSTILE / case["file"])
        except Bw24Error as error:
            refused = str(error)
    if refused:
        assert_one_safe_line(refused)
    if case["expect"] == "reject":
        assert refused, f"{case['fault']}: accepted"
    if case["expect"] == "accept":
        assert refused is None, refused


def refuse_or_accept(data: bytes) -> bool:
    try:
        parse_header(BytesSource(data), "m.gguf")
    except Bw24Error as error:
        assert_one_safe_line(str(error))
        return False
    return True


def test_every_truncation_is_refused(tmp_path):
    whole = (HOSTILE / "ok-minimal.gguf").read_bytes()
    assert refuse_or_accept(whole)
    with open_gguf(HOSTILE / "ok-minimal.gguf") as g:
        end = max(t.offset + t.nbytes for t in g.tensors.values())  # only the padding behind the last tensor may be missing
    path = tmp_path / "m.gguf"
    for size in range(end):
        with Watch():
            assert not refuse_or_accept(whole[:size]), size
    path.write_bytes(whole)
    for size in range(end - 1, 0, -37):
        os.truncate(path, size)
        with pytest.raises(Bw24Error), Watch():
            open_gguf(path)


def test_every_flipped_byte_is_survived():
    whole, accepted = (HOSTILE / "ok-minimal.gguf").read_bytes(), 0
    for at, byte in enumerate(whole):
        for value in (0x00, 0xFF, byte ^ 0x80):
            with Watch():
                accepted += refuse_or_accept(whole[:at] + bytes([value]) + whole[at + 1 :])
    assert 0 < accepted < 3 * len(whole)


def test_a_huge_sparse_file_is_not_read_into_memory(tmp_path):
    """Counts that fit a huge file must still not be allocated: sizes are capped, not only compared with the file's."""
    import struct

    path = tmp_path / "m.gguf"
    key = struct.pack("<Q", 1) + b"k"
    for tail in (key + struct.pack("<IQ", 8, 1 << 38), key + struct.pack("<IIQ", 9, 4, 1 << 36), key + struct.pack("<IIQ", 9, 8, 1 << 36),
                 struct.pack("<Q", 1 << 38)):
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + tail)
        os.truncate(path, 1 << 40)
        with pytest.raises(Bw24Error, match="limit"), Watch():
            open_gguf(path)


def test_the_largest_alignment_is_accepted_and_twice_that_refused(tmp_path):
    with GGUFWriter(tmp_path / "m.gguf", MAX_ALIGNMENT) as w:
        w.add_tensor("t", "F32", (1,), bytes(4))
    data = (tmp_path / "m.gguf").read_bytes()
    assert refuse_or_accept(data)
    assert not refuse_or_accept(data.replace(MAX_ALIGNMENT.to_bytes(4, "little"), (2 * MAX_ALIGNMENT).to_bytes(4, "little"), 1))


def test_fuzz_for_two_seconds(tmp_path):
    assert fuzz(2.0, 24, tmp_path) == 0
