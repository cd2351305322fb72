"""What a model will take, before it is loaded: the library's own arithmetic on the lists and the shapes of the tensors. Owns the question of what
fits, and what to say where it does not; reads no weight and needs no device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from . import abi

_NO_DATA = 64  # an address that is never read


@dataclass(frozen=True)
class Shape:
    """A tensor without its bytes."""

    name: str
    type_id: int
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Sizes:
    """Bytes at one context length: weights as the backend holds them, work buffers, KV pages of one sequence, its recurrent state, what does
    not depend on the model; `device` and `host` are the sums on the card and in the host's memory; experts: of `weights` on a card."""

    context: int
    weights: int
    work: int
    kv: int
    state: int
    fixed: int
    device: int
    host: int
    experts: int

    @property
    def total(self) -> int:
        """On the card where there is one, else in the host's memory."""
        return self.device or self.host


def predict(tensors: Iterable[Any], lists: Mapping[str, str], backend: str, kv: Mapping[str, str], context: int, max_rows: int,
            threads: int | None = None, repack: bool = True) -> Sizes:
    """Sizes of a model. tensors: with name, type_id, shape (columns first) and nbytes; lists: text by role, the trunk first; kv: formats by
    layer class. Raises Bw24Error where the backend does not run the lists."""
    lib, ffi = abi.lib(), abi.ffi
    p = abi.new("bw24_open_params")
    name = ffi.new("char[]", backend.encode())
    p.backend, p.threads, p.fuse, p.repack, p.plan_only = name, threads or 0, 1, repack, 1
    ctx, model = ffi.new("bw24_ctx **"), ffi.new("bw24_model **")
    abi.check(lib.bw24_open(ctx, p))
    try:
        q = abi.new("bw24_model_params")
        formats = [ffi.new("char[]", kv[k].encode()) for k in ("full", "window")]
        q.max_rows, q.max_context, q.kv_full, q.kv_window = max_rows, context, *formats
        abi.check(lib.bw24_model_new(model, ctx[0], q))
        for t in tensors:
            ne = ffi.new("int64_t[]", list(t.shape))
            abi.check(lib.bw24_tensor_load(model[0], t.name.encode(), t.type_id, len(t.shape), ne, ffi.cast("void *", _NO_DATA), t.nbytes, 1.0, 0))
        for role, text in lists.items():
            abi.check(lib.bw24_list_set(model[0], role.encode(), text.encode()))
        out = abi.new("bw24_memory")
        abi.check(lib.bw24_predict(model[0], out))
        return Sizes(context, out.weights, out.work, out.kv, out.state, out.fixed, out.device, out.host, out.experts)
    finally:
        lib.bw24_model_free(model[0])
        lib.bw24_close(ctx[0])


def largest_context(need: Callable[[int], int], own: int, room: int, least: int = 64) -> int:
    """The longest context of own, own/2, own/4, ... that `room` bytes hold; 0 where not even `least` does."""
    context = own
    while need(context) > room:
        if context <= least:
            return 0
        context = max(least, context // 2)
    return context
