"""Models made of a list's text and arrays, for tests of single ops and of errors inside a step. Owns the handles; knows no file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from bw24 import abi

Tensor = tuple[str, tuple[int, ...], bytes]  # type name, ne (ne[0] = columns), data


def f32(array: np.ndarray) -> Tensor:
    """An F32 tensor of a numpy array, rows first."""
    array = np.ascontiguousarray(array, np.float32)
    return "F32", tuple(reversed(array.shape)), array.tobytes()


class MiniModel:
    """A prepared model. `step` takes (sequence handle, token, want) rows. Raises Bw24Error as the library does."""

    def __init__(self, text: str, tensors: Mapping[str, Tensor], *, backend: str = "ref", isa: str | None = None, threads: int = 2,
                 max_rows: int = 64, context: int = 4096, kv: str = "f32", fuse: bool = True, repack: bool = True):
        self.ctx = self.model = None
        self._keep: list[object] = []
        ffi, lib = abi.ffi, abi.lib()
        try:
            p = abi.new("bw24_open_params")
            p.backend, p.isa = (self._text(s) if s else ffi.NULL for s in (backend, isa))
            p.threads, p.fuse, p.repack = threads, fuse, repack
            out = ffi.new("bw24_ctx **")
            abi.check(lib.bw24_open(out, p))
            self.ctx = out[0]
            q = abi.new("bw24_model_params")
            q.max_rows, q.max_context, q.kv_full, q.kv_window = max_rows, context, self._text(kv), self._text(kv)
            model = ffi.new("bw24_model **")
            abi.check(lib.bw24_model_new(model, self.ctx, q))
            self.model = model[0]
            for name, (kind, ne, data) in tensors.items():
                self._keep.append(raw := ffi.from_buffer(data))
                dims = ffi.new("int64_t[]", list(ne))
                abi.check(lib.bw24_tensor_load(self.model, name.encode(), abi.type_id(kind), len(ne), dims, raw, len(data), 1.0, 0))
            abi.check(lib.bw24_list_set(self.model, b"trunk", text.encode()))
            for i in range(len(tensors) + 1):
                abi.check(lib.bw24_prepare(self.model, i))
            self.n_vocab = lib.bw24_model_vocab(self.model)
        except BaseException:
            self.close()
            raise

    def _text(self, s: str) -> object:
        self._keep.append(p := abi.ffi.new("char[]", s.encode()))
        return p

    def sequence(self) -> object:
        out = abi.ffi.new("bw24_seq **")
        abi.check(abi.lib().bw24_seq_new(out, self.model))
        return out[0]

    def step(self, rows: Sequence[tuple[object, int, bool]]) -> np.ndarray:
        c = abi.ffi.new("bw24_row[]", [{"seq": s, "token": t, "want": w} for s, t, w in rows])
        logits = np.empty((sum(bool(w) for _, _, w in rows), self.n_vocab), np.float32)
        abi.check(abi.lib().bw24_step(self.model, c, len(rows), abi.ffi.cast("float *", abi.ffi.from_buffer(logits))))
        return logits

    def close(self) -> None:
        if self.model:
            abi.lib().bw24_model_free(self.model)
        if self.ctx:
            abi.lib().bw24_close(self.ctx)
        self.ctx = self.model = None

    def __enter__(self) -> MiniModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
