"""ROUTE, EXPERTS, CONV, DELTA, DECAY, GATE and SLICE by themselves: against numpy in float64, cpu against ref bit for bit, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from bw24 import abi
from bw24.errors import Bw24Error
from mini_model import MiniModel, Tensor, f32

ISAS = [i for i in ("portable", "avx2", "avxvnni", "avx512vnni") if abi.lib().bw24_isa_supported(i.encode())]
BACKENDS = [("ref", None), *(("cpu", isa) for isa in ISAS)]


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def run(text: str, tensors: dict[str, Tensor], count: int, widths: tuple[int, ...] = (64,)) -> np.ndarray:
    """Rows 0..count-1 of the list through every backend and in steps of every width: all must give the same bits, which are returned."""
    found = None
    for backend, isa in BACKENDS:
        with MiniModel(text, tensors, backend=backend, isa=isa) as m:
            for width in widths:
                seq = m.sequence()
                out = np.concatenate([m.step([(seq, t, True) for t in range(i, min(i + width, count))]) for i in range(0, count, width)])
                abi.lib().bw24_seq_free(seq)
                found = out if found is None else found
                assert out.tobytes() == found.tobytes(), (backend, isa, width)
    return found


def inputs(arrays: dict[str, np.ndarray]) -> tuple[str, dict[str, Tensor]]:
    """A buffer NAME for each array, row t of it from token t; list text and tensors."""
    head = "".join(f"BUF {n} {a.shape[1]}\n" for n, a in arrays.items())
    return head + "{}" + "".join(f"EMBED y={n} w=in_{n}\n" for n in arrays), {f"in_{n}": f32(a) for n, a in arrays.items()}


def op_text(arrays: dict[str, np.ndarray], decl: str, ops: str, out: str, width: int, extra: dict[str, Tensor] | None = None):
    text, tensors = inputs(arrays)
    return text.format(f"BUF logits {width}\n" + decl) + ops + f"PICK_ROWS y=logits x={out}\n", tensors | (extra or {})


# ---- ROUTE


def routed(logits: np.ndarray, top: int, kind: str, bias=None, groups: int = 1, keep: int = 1, norm: bool = True, scale: float = 1.0) -> np.ndarray:
    x = logits.astype(np.float64)
    p = sigmoid(x) if kind == "sigmoid" else np.exp(x - x.max(1, keepdims=True))
    p = p if kind == "sigmoid" else p / p.sum(1, keepdims=True)
    c = p if bias is None else p + bias
    if groups > 1:
        best = np.sort(c.reshape(len(c), groups, -1), 2)[:, :, -2:].sum(2)
        chosen = np.argsort(-best, 1, kind="stable")[:, :keep]
        mask = np.ones((len(c), groups), bool)
        np.put_along_axis(mask, chosen, False, 1)
        c = np.where(np.repeat(mask, c.shape[1] // groups, 1), -np.inf, c)
    ids = np.argsort(-c, 1, kind="stable")[:, :top]
    w = np.take_along_axis(p, ids, 1)
    return np.concatenate([(w / w.sum(1, keepdims=True) if norm else w) * scale, ids], 1)


ROUTES = {
    "softmax": (32, {"top": 4, "kind": "softmax"}),
    "softmax of all": (7, {"top": 7, "kind": "softmax", "norm": False}),
    "sigmoid": (33, {"top": 8, "kind": "sigmoid", "scale": 2.5}),
    "sigmoid, bias": (256, {"top": 8, "kind": "sigmoid", "bias": True, "scale": 2.826}),
    "groups": (64, {"top": 6, "kind": "sigmoid", "bias": True, "groups": 8, "keep": 3}),
    "groups of one": (8, {"top": 2, "kind": "softmax", "groups": 8, "keep": 4}),
    "one": (1, {"top": 1, "kind": "sigmoid", "norm": False}),
}


@pytest.mark.parametrize("case", ROUTES)
def test_route(case):
    experts, how = ROUTES[case]
    rng = np.random.default_rng(len(case))
    logits = (rng.normal(size=(48, experts)) * 3).astype(np.float32)
    extra, bias = {}, None
    if how.get("bias"):
        bias = rng.normal(size=experts).astype(np.float32)
        extra["b"] = f32(bias)
    args = " ".join(f"{k}={int(v) if isinstance(v, bool) else v}" for k, v in how.items() if k != "bias") + (" b=b" if extra else "")
    text, tensors = op_text({"x": logits}, f"BUF r {2 * how['top']}\n", f"ROUTE y=r x=x {args}\n", "r", 2 * how["top"], extra)
    found = run(text, tensors, 48, (1, 48))
    expected = routed(logits, **{**how, "bias": bias})
    assert (found[:, how["top"] :] == expected[:, how["top"] :]).all()
    np.testing.assert_allclose(found[:, : how["top"]], expected[:, : how["top"]], rtol=2e-6, atol=1e-7)


def test_route_ties_go_to_the_lowest():
    logits = np.zeros((3, 16), np.float32)
    logits[1, 5:] = 1.0
    logits[2] = 200.0  # saturated
    for kind in ("softmax", "sigmoid"):
        text, tensors = op_text({"x": logits}, "BUF r 6\n", f"ROUTE y=r x=x top=3 kind={kind} groups=4 keep=2\n", "r", 6)
        assert run(text, tensors, 3)[:, 3:].tolist() == [[0, 1, 2], [5, 6, 7], [0, 1, 2]]


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_route_reports_inf_and_nan(value):
    logits = np.zeros((4, 16), np.float32)
    logits[2, 9] = value
    text, tensors = op_text({"x": logits}, "BUF r 4\n", "ROUTE y=r x=x top=2 kind=softmax\n", "r", 4)
    for backend in ("ref", "cpu"):
        with MiniModel(text, tensors, backend=backend) as m:
            seq = m.sequence()
            with pytest.raises(Bw24Error, match="ROUTE.*Inf or NaN"):
                m.step([(seq, t, True) for t in range(4)])
            assert abi.lib().bw24_seq_pos(seq) == 0
            abi.lib().bw24_seq_free(seq)


# ---- EXPERTS


def quantised(kind: str, array: np.ndarray) -> tuple[Tensor, np.ndarray]:
    """The array in a type, and what it then holds."""
    array = np.ascontiguousarray(array, np.float32)
    if kind == "F32":
        return f32(array), array
    _, block, size, _ = abi.types()[abi.type_id(kind)]
    data = abi.ffi.new("uint8_t[]", array.size // block * size)
    abi.check(abi.lib().bw24_quantize(abi.type_id(kind), abi.ffi.cast("float *", abi.ffi.from_buffer(array)), data, array.size))
    back = np.empty_like(array)
    abi.check(abi.lib().bw24_dequantize(abi.type_id(kind), data, abi.ffi.cast("float *", abi.ffi.from_buffer(back)), array.size))
    return (kind, array.shape[::-1], bytes(abi.ffi.buffer(data))), back


class Mixture:
    """Random experts [e][f][x] and rows routed over them."""

    def __init__(self, kinds: tuple[str, str, str], experts: int = 6, width: int = 64, ff: int = 96, top: int = 3, rows: int = 40):
        rng = np.random.default_rng(7)
        self.x, self.logits = (rng.normal(size=(rows, n)).astype(np.float32) for n in (width, experts))
        self.top, self.width, self.ff, self.experts, self.rows = top, width, ff, experts, rows
        shapes = ((experts, ff, width), (experts, ff, width), (experts, width, ff))
        self.raw = [rng.normal(size=s).astype(np.float32) * 0.2 for s in shapes]
        both = [quantised(k, a) for k, a in zip(kinds, self.raw, strict=True)]
        self.tensors, self.values = [b[0] for b in both], [b[1].astype(np.float64) for b in both]
        self.scales = rng.uniform(0.5, 1.5, (3, experts)).astype(np.float32)

    def run(self, args: str = "g=g u=u d=d", act: str = "silu", **extra: Tensor) -> np.ndarray:
        decl = f"BUF r {2 * self.top}\nBUF y {self.width}\n"
        ops = f"ROUTE y=r x=l top={self.top} kind=softmax\nEXPERTS y=y x=x r=r {args} act={act}\n"
        tensors = dict(zip("gud", self.tensors, strict=True)) | extra
        return run(*op_text({"x": self.x, "l": self.logits}, decl, ops, "y", self.width, tensors), self.rows, (1, 3, 40))

    def expected(self, scales: np.ndarray | None = None) -> np.ndarray:
        g, u, d = self.values
        route = routed(self.logits, self.top, "softmax")
        out = np.zeros((self.rows, self.width))
        for t in range(self.rows):
            for w, e in zip(route[t, : self.top], route[t, self.top :].astype(int), strict=True):
                s = scales[:, e] if scales is not None else np.ones(3)
                out[t] += w * s[2] * (d[e] @ (silu(s[0] * (g[e] @ self.x[t])) * (s[1] * (u[e] @ self.x[t]))))
        return out


KINDS = ("F32 F32 F32", "F16 F16 F32", "Q8_0 Q8_0 Q8_0", "Q4_0 Q4_1 Q8_0", "F16 F32 Q8_0", "Q8_0 Q4_0 F32")


@pytest.mark.parametrize("kinds", [tuple(k.split()) for k in KINDS], ids="-".join)
def test_experts(kinds):
    """Few and many rows, every type on its own path; quantised activations cost what they cost anywhere."""
    m = Mixture(kinds)
    found, expected = m.run(), m.expected()
    limit = 1e-4 if not any(k.startswith("Q") for k in kinds) else 0.03
    assert np.abs(found - expected).max() < limit * np.abs(expected).max()


def test_experts_fused_and_scaled():
    m = Mixture(("Q8_0",) * 3, ff=32)
    fused, _ = quantised("Q8_0", np.concatenate(m.raw[:2], axis=1))
    assert m.run("g=gu d=d", gu=fused).tobytes() == m.run().tobytes()
    extra = {f"s{i}": f32(m.scales[i]) for i in range(3)}
    found, expected = m.run("g=g u=u d=d gs=s0 us=s1 ds=s2", **extra), m.expected(m.scales)
    assert np.abs(found - expected).max() < 0.03 * np.abs(expected).max()
    assert np.abs(m.run(act="gelu") - m.run()).max() > 0.01


@pytest.mark.parametrize("ff", [16, 40, 48])
def test_experts_whose_rows_fill_no_tile(ff):
    m = Mixture(("F32",) * 3, ff=ff)
    np.testing.assert_allclose(m.run(), m.expected(), rtol=1e-4, atol=1e-4)
    both = np.concatenate(m.raw[:2], axis=1)
    assert m.run("g=gu d=d", gu=f32(both)).tobytes() == m.run().tobytes()


BAD_EXPERTS = {
    "a route that no ROUTE wrote": ("EXPERTS y=y x=x r=l6 g=g u=u d=d act=silu\n", "a route written by the op"),
    "no per-expert scale": (
        "ROUTE y=r x=l top=3 kind=softmax\nEXPERTS y=y x=x r=r g=g u=u d=d ds=one act=silu\n", "per-expert scales expects 6, found 1"),
    "its own input": ("ROUTE y=r x=l top=3 kind=softmax\nEXPERTS y=x x=x r=r g=g u=u d=d act=silu\n", "an output that is no input"),
    "more than there are": ("ROUTE y=r8 x=l top=7 kind=softmax\n", "a top of 1 up to the experts expects 6, found 7"),
    "uneven groups": ("ROUTE y=r x=l top=3 kind=softmax groups=4\n", "modulo groups"),
    "too few experts kept": ("ROUTE y=r x=l top=3 kind=softmax groups=3 keep=1\n", "a top within the kept groups"),
    "other experts": ("ROUTE y=r x=x top=3 kind=softmax\nEXPERTS y=y x=x r=r g=g u=u d=d act=silu\n", "experts of the route expects 6, found 64"),
}


@pytest.mark.parametrize("case", BAD_EXPERTS)
def test_lists_that_are_refused(case):
    ops, message = BAD_EXPERTS[case]
    m = Mixture(("Q8_0",) * 3)
    decl = "BUF r 6\nBUF r8 14\nBUF y 64\n"
    weights = dict(zip("gud", m.tensors, strict=True)) | {"one": f32(np.ones(1))}
    text, tensors = op_text({"x": m.x, "l": m.logits, "l6": m.logits}, decl, ops, "x", 64, weights)
    with pytest.raises(Bw24Error, match=message), MiniModel(text, tensors):
        pass


# ---- CONV, DELTA, DECAY, GATE, SLICE


@pytest.mark.parametrize("channels,taps", [(1, 2), (31, 4), (600, 4), (48, 8)])
def test_conv(channels, taps):
    rng = np.random.default_rng(3)
    x, w = rng.normal(size=(40, channels)).astype(np.float32), rng.normal(size=(channels, taps)).astype(np.float32)
    decl = f"BUF y {channels}\nSTATE s {(taps - 1) * channels}\n"
    found = run(*op_text({"x": x}, decl, "CONV y=y x=x w=w st=s\n", "y", channels, {"w": f32(w)}), 40, (1, 2, 7, 40))
    before = np.concatenate([np.zeros((taps - 1, channels)), x])
    expected = silu(sum(before[t : t + 40] * w[:, t].astype(np.float64) for t in range(taps)))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("order", ["tiled", "grouped"])
@pytest.mark.parametrize("heads,kheads,dk,dv", [(4, 2, 16, 16), (3, 1, 6, 40), (2, 2, 128, 128), (6, 3, 33, 9), (1, 1, 1, 1)])
def test_delta(heads, kheads, dk, dv, order):
    rng, n = np.random.default_rng(11), 50
    q, k = (rng.normal(size=(n, kheads * dk)).astype(np.float32) / np.sqrt(dk).astype(np.float32) for _ in range(2))
    v = rng.normal(size=(n, heads * dv)).astype(np.float32)
    decay, beta = (rng.uniform(0.1, 1, (n, heads)).astype(np.float32) for _ in range(2))
    decl = f"BUF y {heads * dv}\nSTATE s {heads * dk * dv}\n"
    ops = f"DELTA y=y q=q k=k v=v g=g b=b st=s heads={heads} kheads={kheads} order={order}\n"
    found = run(*op_text({"q": q, "k": k, "v": v, "g": decay, "b": beta}, decl, ops, "y", heads * dv), n, (1, 9, 50))
    state, expected = np.zeros((heads, dk, dv)), np.zeros((n, heads, dv))
    for t in range(n):
        for h in range(heads):
            key = h % kheads if order == "tiled" else h // (heads // kheads)
            kk, qq = (a[t].reshape(kheads, dk)[key].astype(np.float64) for a in (k, q))
            state[h] *= decay[t, h]
            state[h] += np.outer(kk, beta[t, h] * (v[t].reshape(heads, dv)[h] - kk @ state[h]))
            expected[t, h] = qq @ state[h]
    np.testing.assert_allclose(found, expected.reshape(n, -1), rtol=1e-4, atol=1e-4)


def test_delta_reports_inf_and_nan():
    one = np.ones((6, 4), np.float32)
    v = one.copy()
    v[3, 2] = np.nan
    arrays = {"q": one, "k": one, "v": v, "g": one[:, :1], "b": one[:, :1]}
    text, tensors = op_text(arrays, "BUF y 4\nSTATE s 16\n", "DELTA y=y q=q k=k v=v g=g b=b st=s heads=1 kheads=1 order=tiled\n", "y", 4)
    for backend in ("ref", "cpu"):
        with MiniModel(text, tensors, backend=backend) as m:
            seq = m.sequence()
            good = m.step([(seq, t, True) for t in range(3)])
            with pytest.raises(Bw24Error, match="DELTA s? ?.*Inf or NaN"):
                m.step([(seq, 3, False), (seq, 4, False)])
            again = m.step([(seq, 4, True)])
            assert np.isfinite(good).all() and np.isfinite(again).all()
            abi.lib().bw24_seq_free(seq)


def test_decay_sigmoid_gate_slice_and_scale():
    rng = np.random.default_rng(2)
    x, g = (rng.normal(size=(20, 36)).astype(np.float32) * 4 for _ in range(2))
    a, dt = -rng.uniform(0.01, 8, 36).astype(np.float32), rng.normal(size=36).astype(np.float32)
    x64, g64 = x.astype(np.float64), g.astype(np.float64)
    pairs = x64.reshape(20, 3, 12)[:, :, 5:11] + g64.reshape(20, 3, 12)[:, :, :6]
    cases = {
        "DECAY y=y x=x a=a dt=dt": np.exp(a.astype(np.float64) * np.logaddexp(0, x64 + dt)),
        "SIGMOID y=y x=x": sigmoid(x64),
        "GATE y=y x=x g=g": x64 * sigmoid(g64),
        "SLICE y=g4 x=g heads=1 from=7\nGATE y=y x=x g=g4": (x64.reshape(20, 4, 9) * sigmoid(g64[:, 7:11, None])).reshape(20, 36),
        "SCALE y=y x=x w=one": x64 * a[0],
        "SLICE y=h x=x heads=3 from=5\nSLICE y=h2 x=g heads=3\nADD y=h a=h b=h2\nGATE y=y x=x g=h":
            (x64.reshape(20, 18, 2) * sigmoid(pairs.reshape(20, 18, 1))).reshape(20, 36),
    }
    for ops, expected in cases.items():
        decl = "BUF y 36\nBUF g4 4\nBUF h 18\nBUF h2 18\n"
        found = run(*op_text({"x": x, "g": g}, decl, ops + "\n", "y", 36, {"a": f32(a), "dt": f32(dt), "one": f32(a[:1])}), 20, (1, 20))
        np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-6, err_msg=ops)


BAD_STATES = {
    "a state of another size": ("STATE s 11", "CONV y=y x=x w=w st=s\n", "floats of the state expects 12, found 11"),
    "a state of two ops": ("STATE s 12", "CONV y=y x=x w=w st=s\nCONV y=z x=y w=w st=s\n", "a state of its own"),
    "an unknown state": ("STATE s 12", "CONV y=y x=x w=w st=t\n", "unknown state 't'"),
    "a state declared twice": ("STATE s 12\nSTATE s 12", "CONV y=y x=x w=w st=s\n", "declared twice"),
    "picked rows": ("STATE s 12", "PICK_ROWS y=p x=x\nCONV y=z x=p w=w st=s\n", "all rows of the step"),
    "its own input": ("STATE s 12", "CONV y=x x=x w=w st=s\n", "an output that is no input"),
}


@pytest.mark.parametrize("case", BAD_STATES)
def test_states_that_are_refused(case):
    state, ops, message = BAD_STATES[case]
    text, tensors = op_text({"x": np.ones((2, 4), np.float32)}, f"BUF y 4\nBUF z 4\nBUF p 4\n{state}\n", ops, "x", 4, {"w": f32(np.ones((4, 4)))})
    with pytest.raises(Bw24Error, match=message), MiniModel(text, tensors):
        pass
