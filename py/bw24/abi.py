"""The cffi binding (ABI mode): parses the marked block of bw24.h, opens libbw24.so, checks that both belong together, turns status codes into
Bw24Error. Owns no memory of the library; knows nothing of models or files."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from cffi import FFI

from . import flags
from .errors import Bw24Error

ABI = 1  # the header this package was written against
_HERE = Path(__file__).parent
_STRUCTS = (
    "bw24_open_params", "bw24_model_params", "bw24_row", "bw24_sampler", "bw24_memory", "bw24_type_facts", "bw24_op_facts", "bw24_check_result",
    "bw24_device_facts", "bw24_pick", "bw24_rates", "bw24_spill_params", "bw24_place", "bw24_spill_counts",
    "bw24_round_request", "bw24_round_times", "bw24_rounds_log", "bw24_decode_request",
)


def _header_block() -> str:
    for path in (_HERE / "bw24.h", _HERE.parent.parent / "libbw24" / "bw24.h"):
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            return text.split("/* BW24_CFFI_BEGIN */")[1].split("/* BW24_CFFI_END */")[0]
    raise Bw24Error("bw24.h is missing beside the package: run `make` in the repository, or reinstall the wheel")


ffi = FFI()
ffi.cdef(_header_block())


@cache
def lib(path: str | None = None):
    """The opened library: `path`, else the flag BW24_LIBRARY, else the one beside the package. Raises Bw24Error."""
    path = path or flags.environment("library")
    where = Path(path) if path else _HERE / "libbw24.so"
    if not where.is_file():
        raise Bw24Error(f"{where} is missing: run `make` in the repository, or reinstall the wheel")
    try:
        handle = ffi.dlopen(str(where))
        found = handle.bw24_abi()
    except (OSError, AttributeError) as e:
        raise Bw24Error(f"{where} cannot be loaded: {e}") from None
    if found != ABI:
        raise Bw24Error(f"{where} has ABI {found}, this package needs {ABI}: run `make` again")
    for name in _STRUCTS:
        theirs, ours = handle.bw24_struct_size(name.encode()), ffi.sizeof(name)
        if theirs != ours:
            raise Bw24Error(f"{where}: struct {name} has {theirs} bytes, the header says {ours}: run `make` again")
    return handle


def check(status: int) -> None:
    """Raises Bw24Error with the library's message and code if `status` is negative."""
    if status < 0:
        raise Bw24Error(ffi.string(lib().bw24_last_error()).decode("utf-8", "replace"), code=status)


def new(struct: str):
    """A zeroed struct whose `size` field is set."""
    p = ffi.new(f"{struct} *")
    p.size = ffi.sizeof(struct)
    return p


def version() -> str:
    """Revision the library was built from."""
    return ffi.string(lib().bw24_version()).decode()


def abi_number() -> int:
    return lib().bw24_abi()


@cache
def ops() -> dict[str, tuple[str, str]]:
    """Op name -> (operands in ops.def's notation, state class)."""
    out, facts, i = {}, ffi.new("bw24_op_facts *"), 0
    while lib().bw24_op_info(i, facts) == 0:
        out[ffi.string(facts.name).decode()] = (ffi.string(facts.operands).decode(), ffi.string(facts.state).decode())
        i += 1
    return out


@cache
def types() -> dict[int, tuple[str, int, int, bool]]:
    """Type id -> (name, values per block, bytes per block, whether the library can encode it)."""
    out, facts, i = {}, ffi.new("bw24_type_facts *"), 0
    while lib().bw24_type_info(i, facts) == 0:
        out[facts.id] = (ffi.string(facts.name).decode(), facts.block, facts.bytes, bool(facts.can_encode))
        i += 1
    return out


def type_id(name: str) -> int:
    """Id of a storage type by name. Raises Bw24Error."""
    for number, facts in types().items():
        if facts[0] == name:
            return number
    raise Bw24Error(f"unknown storage type {name}; the library has {', '.join(f[0] for f in types().values())}")
