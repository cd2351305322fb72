"""Hashes of what the reference computes: per (op, type, shape), per KV format, per sampler setting, and of the logits of each tiny model in
tests/fixtures. They pin the numeric program across revisions and machines.

    python scripts/digests.py            compares tests/fixtures/digests.json with this build, names what differs, exits 1
    python scripts/digests.py --write    writes the file; a changed digest needs a decision record in docs/decisions/
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from bw24 import abi, engine, sampling, source  # noqa: E402
from mini_model import MiniModel, Tensor, f32  # noqa: E402

DIGESTS = ROOT / "tests" / "fixtures" / "digests.json"
MODELS = ("gemma3", "llama-q4_1-iq4_nl", "llama-q4_k", "llama-untied", "qwen3")
TOKENS, ROWS = 24, 5
KV = ("f32", "f16", "q8_0", "q5_1", "q8_0/q5_1")


class Numbers:
    """A stream of integers that no library's version can change: splitmix64 from a hash of the name, its high 32 bits."""

    def __init__(self, name: str):
        self.state = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")

    def u32(self, n: int) -> np.ndarray:
        step = 0x9E3779B97F4A7C15
        z = np.uint64(self.state) + np.arange(1, n + 1, dtype=np.uint64) * np.uint64(step)
        self.state = (self.state + n * step) & ((1 << 64) - 1)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((z ^ (z >> np.uint64(31))) >> np.uint64(32)).astype(np.uint32)

    def values(self, *shape: int) -> np.ndarray:
        """f32 in [-1, 1), multiples of 2^-23; one row in six is zero, another is scaled to 2^-120, where subnormals appear."""
        n = int(np.prod(shape))
        x = ((self.u32(n) >> 8).astype(np.float64) * 2.0**-23 - 1).astype(np.float32).reshape(shape)
        if len(shape) == 2:
            x[2::6] = 0
            x[4::6] *= np.float32(2.0**-120)
        return x

    def blocks(self, kind: str, columns: int, rows: int) -> Tensor:
        """Random blocks of a storage type whose values are finite and at most 8 in magnitude."""
        number = abi.type_id(kind)
        _, block, size, _ = abi.types()[number]
        n = rows * columns // block
        data = self.u32(n * size).astype(np.uint8).reshape(n, size)
        for _ in range(2000):
            value = np.empty((n, block), np.float32)
            out = abi.ffi.cast("float *", abi.ffi.from_buffer(value))
            abi.check(abi.lib().bw24_dequantize(number, abi.ffi.from_buffer(data), out, n * block))
            wild = np.nonzero(~(np.abs(value) <= 8).all(axis=1))[0]
            if not len(wild):
                return kind, (columns, rows), data.tobytes()
            data[wild] = self.u32(len(wild) * size).astype(np.uint8).reshape(-1, size)
        raise SystemExit(f"{kind}: no tame blocks in 2000 rounds")


def inputs(name: str, **widths: int) -> tuple[str, dict[str, Tensor]]:
    """A list's beginning: one buffer a name, filled by EMBED from a table of its own."""
    numbers, text, tensors = Numbers(name), "", {}
    for buf, width in widths.items():
        text += f"BUF {buf} {width}\nEMBED y={buf} w=in_{buf}\n"
        tensors[f"in_{buf}"] = f32(numbers.values(TOKENS, width))
    return text, tensors


def ending(y: str, width: int) -> str:
    return f"BUF logits {width}\nPICK_ROWS y=logits x={y}\n"


def linear_cases() -> Iterator[tuple[str, str, dict[str, Tensor], dict]]:
    for kind, block, _, _ in sorted(abi.types().values()):
        for rows, columns in ((17, 512), (33, 576)):
            if columns % block:
                continue
            name = f"LINEAR {kind} {rows}x{columns}"
            text, tensors = inputs(name, x=columns)
            tensors["w"] = Numbers(name + " w").blocks(kind, columns, rows)
            yield name, f"{text}BUF y {rows}\nLINEAR y=y x=x w=w\n{ending('y', rows)}", tensors, {}
        name = f"EMBED {kind} 256"
        tensors = {"w": Numbers(name).blocks(kind, 256, TOKENS)}
        yield name, f"BUF x 256\nEMBED y=x w=w scale=25.298221\n{ending('x', 256)}", tensors, {}


def row_cases() -> Iterator[tuple[str, str, dict[str, Tensor], dict]]:
    for n in (1, 33, 576, 1536):
        for op, line, names in (
            ("NORM", "NORM y=y x=x w=n eps=1e-05", "x"), ("NORM l2", "NORM y=y x=x eps=1e-06 kind=l2", "x"),
            ("ADD", "ADD y=y a=x b=z", "xz"), ("SCALE", "SCALE y=y x=x c=0.1767767", "x"), ("GLU silu", "GLU y=y g=x u=z act=silu", "xz"),
            ("GLU gelu", "GLU y=y g=x u=z act=gelu", "xz"), ("SOFTCAP", "SOFTCAP y=y x=x cap=30", "x"),
        ):
            name = f"{op} {n}"
            text, tensors = inputs(name, **dict.fromkeys(names, n))
            if op == "NORM":
                tensors["n"] = f32(Numbers(name + " w").values(n))
            yield name, f"{text}BUF y {n}\n{line}\n{ending('y', n)}", tensors, {}
    for line, widths, n in (("GATE y=y x=x g=z", {"x": 576, "z": 576}, 576), ("GATE y=y x=x g=z", {"x": 576, "z": 9}, 576),
                            ("SLICE y=y x=x heads=3 from=32", {"x": 576}, 96), ("CONCAT y=y a=x b=z", {"x": 100, "z": 64}, 164)):
        name = f"{line} {widths}".replace("y=y x=x ", "")
        text, tensors = inputs(name, **widths)
        yield name, f"{text}BUF y {n}\n{line}\n{ending('y', n)}", tensors, {}
    ropes = (("neox", 4, 64, 64, 1e4, 1.0), ("norm", 3, 48, 48, 5e5, 1.0), ("neox", 2, 80, 20, 1e6, 0.125))
    for style, heads, dim, rot, base, scale in ropes:
        name = f"ROPE {style} {heads}x{dim} of {rot}"
        text, tensors = inputs(name, x=heads * dim)
        line = f"ROPE x=x heads={heads} dim={dim} rot={rot} style={style} base={base} scale={scale}"
        yield name, f"{text}{line}\n{ending('x', heads * dim)}", tensors, {}


def moe_cases() -> Iterator[tuple[str, str, dict[str, Tensor], dict]]:
    for experts, top, more in ((8, 2, "kind=softmax"), (31, 5, "norm=0 kind=softmax"), (64, 6, "groups=8 keep=3 kind=sigmoid scale=2.5 b=bias")):
        name = f"ROUTE {top} of {experts} {more}"
        text, tensors = inputs(name, x=experts)
        if "bias" in more:
            tensors["bias"] = f32(Numbers(name + " bias").values(experts))
        yield name, f"{text}BUF y {2 * top}\nROUTE y=y x=x top={top} {more}\n{ending('y', 2 * top)}", tensors, {}
    for kind in ("F32", "BF16", "Q4_0", "Q4_K", "Q6_K", "IQ3_S", "MXFP4", "NVFP4"):
        name = f"EXPERTS {kind} 5 of 256x512"
        text, tensors = inputs(name, x=256, l=5)
        for w, columns, rows in (("g", 256, 512), ("u", 256, 512), ("d", 512, 256)):
            _, _, data = Numbers(f"{name} {w}").blocks(kind, columns, 5 * rows)
            tensors[w] = kind, (columns, rows, 5), data
        text += "BUF r 4\nBUF y 256\nROUTE y=r x=l top=2 kind=softmax\nEXPERTS y=y x=x r=r g=g u=u d=d act=silu\n"
        yield name, text + ending("y", 256), tensors, {}


def fold_cases() -> Iterator[tuple[str, str, dict[str, Tensor], dict]]:
    for n in (33, 576):
        for op, line in (("SIGMOID", "SIGMOID y=y x=x"), ("DECAY", "DECAY y=y x=x a=a dt=dt"), ("CONV", "CONV y=y x=x w=w st=s")):
            name = f"{op} {n}"
            text, tensors = inputs(name, x=n)
            numbers = Numbers(name + " w")
            if op == "DECAY":
                tensors.update(a=f32(-4 * np.abs(numbers.values(n))), dt=f32(numbers.values(n)))
            if op == "CONV":
                tensors["w"] = f32(numbers.values(n)[:, None] * np.array([0.25, -0.5, 0.75, 1], np.float32))
                text += f"STATE s {3 * n}\n"
            yield name, f"{text}BUF y {n}\n{line}\n{ending('y', n)}", tensors, {}
    for heads, kheads, dk, dv, order in ((4, 2, 64, 40, "tiled"), (6, 3, 128, 128, "grouped")):
        name = f"DELTA {heads}/{kheads} {dk}x{dv} {order}"
        text, tensors = inputs(name, q=kheads * dk, k=kheads * dk, v=heads * dv, g=heads, b=heads)
        text += f"STATE s {heads * dk * dv}\nBUF y {heads * dv}\n"
        text += "".join(f"NORM y={x} x={x} heads={kheads} eps=1e-06 kind=l2\n" for x in "qk") + "SIGMOID y=g x=g\nSIGMOID y=b x=b\n"
        text += f"DELTA y=y q=q k=k v=v g=g b=b st=s heads={heads} kheads={kheads} order={order}\n"
        yield name, text + ending("y", heads * dv), tensors, {}


def attend_cases() -> Iterator[tuple[str, str, dict[str, Tensor], dict]]:
    for kv in KV:
        for heads, kv_heads, dim, window in ((4, 2, 64, 0), (2, 1, 256, 0), (3, 3, 32, 40)):
            name = f"ATTEND {kv} {heads}/{kv_heads}x{dim} window {window}"
            text, tensors = inputs(name, q=heads * dim, k=kv_heads * dim, v=kv_heads * dim)
            text = f"KV c heads={kv_heads} dim={dim} window={window}\n{text}BUF y {heads * dim}\nKV_APPEND k=k v=v kv=c\n"
            text += f"ATTEND y=y q=q kv=c heads={heads} scale={2.0 * dim**-0.5!r}\n{ending('y', heads * dim)}"
            yield name, text, tensors, {"kv": kv, "context": 150}


def latent_cases() -> Iterator[tuple[str, str, dict[str, Tensor], dict]]:
    """One matrix a head, parts joined by heads, keys that are values."""
    for kind in ("F32", "BF16", "Q4_0", "Q8_0", "Q4_K", "Q6_K", "IQ4_XS", "NVFP4"):
        name = f"PERHEAD {kind} 5 of 33x512 from 32 of 560"
        text, tensors = inputs(name, x=5 * 560)
        tensors["w"] = kind, (512, 33, 5), Numbers(name + " w").blocks(kind, 512, 5 * 33)[2]
        yield name, f"{text}BUF y 165\nPERHEAD y=y x=x w=w heads=5 from=32\n{ending('y', 165)}", tensors, {}
    name = "CONCAT 3 heads of 64 and 40"
    text, tensors = inputs(name, x=192, z=120)
    yield name, f"{text}BUF y 312\nCONCAT y=y a=x b=z heads=3\n{ending('y', 312)}", tensors, {}
    for kv in KV:
        name = f"ATTEND {kv} 4/1x576 values are keys"
        text, tensors = inputs(name, q=4 * 576, k=576)
        text = f"KV c heads=1 dim=576 window=0 values=keys\n{text}BUF y 2304\nKV_APPEND k=k v=k kv=c\n"
        yield name, f"{text}ATTEND y=y q=q kv=c heads=4 scale=0.0721688\n{ending('y', 2304)}", tensors, {"kv": kv, "context": 150}


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def run_case(text: str, tensors: dict[str, Tensor], backend: str, isa: str | None, kv: str = "f32", context: int = TOKENS) -> bytes:
    """Logits of `context` rows in steps of ROWS, then one by one for the last five."""
    with MiniModel(text, tensors, backend=backend, isa=isa, kv=kv, context=context) as m:
        seq, out, at = m.sequence(), [], 0
        try:
            while at < context:
                n = ROWS if at + 2 * ROWS <= context else 1
                out.append(m.step([(seq, t % TOKENS, True) for t in range(at, at + n)]))
                at += n
        finally:
            abi.lib().bw24_seq_free(seq)
        return b"".join(x.tobytes() for x in out)


def op_digests(backend: str = "ref", isa: str | None = None) -> dict[str, str]:
    cases = [*linear_cases(), *row_cases(), *moe_cases(), *fold_cases(), *attend_cases(), *latent_cases()]
    return {name: sha(run_case(text, tensors, backend, isa, **more)) for name, text, tensors, more in cases}


def model_digests(backend: str = "ref", isa: str | None = None) -> dict[str, str]:
    """Logits of 96 tokens of each tiny model, KV f16, and q8_0 / q5_1 where whole blocks fit a head."""
    out = {}
    for name in MODELS:
        ids = (Numbers(name).u32(96) % 256).tolist()
        with source.open_model(ROOT / "tests" / "fixtures" / "tiny" / f"{name}.gguf") as model:
            for kv in ("f16", "q8_0/q5_1"):
                if kv != "f16" and any(dim % 32 for _, dim, _ in model.builder.kvs.values()):
                    continue
                with engine.Engine(model, backend=backend, isa=isa, kv=kv, threads=2) as e, e.sequence() as seq:
                    out[f"model {name} kv {kv}"] = sha(seq.prefill(ids, "all").tobytes())
    return out


def sampler_digests() -> dict[str, str]:
    """Tokens of 2000 draws from one row of logits under four settings."""
    logits, out = Numbers("sampler").values(1000) * np.float32(9), {}
    history = Numbers("history").u32(50) % 1000
    for settings in ({"temperature": 1.0}, {"temperature": 0.6, "top_p": 0.9}, {"temperature": 1.5, "top_k": 40, "min_p": 0.02},
                     {"temperature": 0.8, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.1}):
        tokens = [sampling.sample(logits, sampling.SamplingParams(seed=i * 7919, **settings), history.tolist(), i) for i in range(2000)]
        out["SAMPLE " + " ".join(f"{k}={v}" for k, v in settings.items())] = sha(np.array(tokens, np.int32).tobytes())
    return out


def all_digests(backend: str = "ref", isa: str | None = None) -> dict[str, str]:
    """Every digest as computed by a backend (and instruction set)."""
    return {**op_digests(backend, isa), **model_digests(backend, isa), **sampler_digests()}


def stored() -> dict[str, str]:
    return json.loads(DIGESTS.read_text(encoding="ascii"))


def differences(found: dict[str, str], want: dict[str, str]) -> list[str]:
    """Names whose digests differ, or that only one side has."""
    return sorted(name for name in found.keys() | want.keys() if found.get(name) != want.get(name))


def main() -> int:
    found = all_digests()
    old = stored() if DIGESTS.is_file() else {}
    wrong = differences(found, old)
    if "--write" in sys.argv[1:]:
        DIGESTS.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n", encoding="ascii")
        print(f"{len(found)} digests written, {len(wrong)} of them new or changed; a changed one needs a record in docs/decisions/")
        return 0
    print("\n".join(wrong) or f"{len(found)} digests equal")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
