"""A caller's floating-point settings change nothing: with round-up, flush-to-zero and denormals-are-zero set in the calling thread every
entry gives the same bytes, and gives the caller its settings back."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from bw24 import abi, engine, sampling
from bw24.source import open_model
from golden_rules import load
from mini_model import MiniModel, f32

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the control word is x86-64's")

UP, DOWN, ZERO, FTZ, DAZ = 0x4000, 0x2000, 0x6000, 0x8000, 0x0040
HOSTILE = {"round up, FTZ, DAZ": 0x1F80 | UP | FTZ | DAZ, "round down": 0x1F80 | DOWN, "toward zero, FTZ": 0x1F80 | ZERO | FTZ}
FLAGS, X87_KEPT = 0x003F, 1 << 31  # sticky exception flags, which work may set; what fp_caller.c says of the other unit


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    """call_with of fp_caller.c."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        pytest.skip("no C compiler")
    so = tmp_path_factory.mktemp("fp") / "caller.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", so, Path(__file__).with_name("fp_caller.c")], check=True)
    return ctypes.CDLL(str(so)).call_with


class Hostile:
    """The library, its functions called under a control word; the word must come back as it was."""

    def __init__(self, caller, control: int):
        self.lib, self.caller, self.control = abi.lib(), caller, control

    def __getattr__(self, name: str):
        real, ffi = getattr(self.lib, name), abi.ffi
        kinds = ffi.typeof(real).args
        if any(k.kind == "primitive" and k.cname in ("float", "double") for k in kinds):
            return real  # bw24_tensor_load: only stores its float

        def call(*args):
            words = [int(ffi.cast("intptr_t", ffi.cast(k, a) if k.kind != "pointer" else ffi.cast("void *", self.pointer(a))))
                     for k, a in zip(kinds, args, strict=True)]
            after = ctypes.c_uint()
            address = ctypes.c_void_p(int(ffi.cast("intptr_t", real)))
            rc = self.caller(address, (ctypes.c_ssize_t * 9)(*words), ctypes.c_uint(self.control), ctypes.byref(after))
            assert after.value & ~FLAGS == self.control | X87_KEPT, name
            return rc

        result = ffi.typeof(real).result
        return call if result.cname == "int" else real

    @staticmethod
    def pointer(a):
        return abi.ffi.from_buffer(a) if isinstance(a, bytes) else a


@pytest.fixture(params=HOSTILE, ids=str)
def hostile(request, caller):
    return Hostile(caller, HOSTILE[request.param])


def run(name: str, fixtures, **settings) -> bytes:
    """Loading, a prompt in two pieces and three decoded tokens."""
    ids = load(fixtures / "tiny" / f"{name}.npz", "b").tokens[:40]
    with open_model(fixtures / "tiny" / f"{name}.gguf") as model, engine.Engine(model, threads=2, **settings) as e, e.sequence() as seq:
        parts = [seq.prefill(ids[:25], "all"), seq.prefill(ids[25:], "all"), *(seq.decode(t)[None] for t in (5, 6, 7))]
        return np.concatenate(parts).tobytes()


@pytest.mark.parametrize("settings", [{"backend": "ref"}, {"isa": "portable"}, {}, {"kv": "q8_0/q5_1"}], ids=str)
@pytest.mark.parametrize("name", ["qwen3", "llama-q4_k"])
def test_models(name, settings, fixtures, hostile, monkeypatch):
    want = run(name, fixtures, **settings)
    monkeypatch.setattr(abi, "lib", lambda path=None: hostile)
    assert run(name, fixtures, **settings) == want


def test_sampling(hostile, monkeypatch):
    rng = np.random.default_rng(4)
    params = [sampling.SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.1, seed=i) for i in range(100)]
    cases = [(rng.normal(size=200).astype(np.float32) * 3, p, rng.integers(0, 200, 9).tolist(), p.seed) for p in params]
    want = [sampling.sample(*c) for c in cases]
    monkeypatch.setattr(abi, "lib", lambda path=None: hostile)
    assert [sampling.sample(*c) for c in cases] == want


def test_storage_types_and_functions(hostile, monkeypatch):
    """Quantising, decoding and the scalar functions, subnormal values among them."""
    ffi = abi.ffi
    x = (np.random.default_rng(6).normal(size=1024) * np.repeat([1, 1e-3, 1e-39, 100], 256)).astype(np.float32)
    source = ffi.cast("float *", ffi.from_buffer(x))

    def everything() -> bytes:
        out = []
        for number, (_, block, size, encodes) in abi.types().items():
            packed, back = ffi.new("uint8_t[]", 1024 // block * size), ffi.new("float[]", 1024)
            if encodes:
                abi.check(abi.lib().bw24_quantize(number, source, packed, 1024))
                abi.check(abi.lib().bw24_dequantize(number, packed, back, 1024))
                out += [bytes(ffi.buffer(packed)), bytes(ffi.buffer(back))]
        for name in (b"exp", b"gelu", b"tanh", b"softplus"):
            y = ffi.new("float[]", 1024)
            abi.check(abi.lib().bw24_canon(name, source, y, 1024))
            out.append(bytes(ffi.buffer(y)))
        return b"".join(out)

    want = everything()
    monkeypatch.setattr(abi, "lib", lambda path=None: hostile)
    assert everything() == want


def test_numbers_of_a_list(hostile, monkeypatch):
    """A number a hair above the middle between two f32 values: its f64 rounding decides which of them the op sees."""
    text = "BUF x 4\nBUF logits 4\nEMBED y=x w=t scale=1.000000059604644775390625000000000001\nPICK_ROWS y=logits x=x\n"

    def scaled() -> bytes:
        with MiniModel(text, {"t": f32(np.ones((2, 4)))}) as m:
            seq = m.sequence()
            try:
                return m.step([(seq, 0, True)]).tobytes()
            finally:
                abi.lib().bw24_seq_free(seq)

    want = scaled()
    monkeypatch.setattr(abi, "lib", lambda path=None: hostile)
    assert scaled() == want
