"""The manylinux platform tag that a shared library deserves: the lowest glibc that has every symbol version it asks for. Reads the ELF file's version
needs; knows nothing of wheels."""

from __future__ import annotations

import platform
import re
import struct
import sys
from pathlib import Path

VERNEED = 0x6FFFFFFE
FLOOR = (2, 17)  # manylinux2014; older policies are no longer accepted by pip's users
# the C++ runtime that a policy promises: highest version of the name -> glibc of the policy (PEP 600's table in auditwheel)
RUNTIME = {
    "GLIBCXX": (((3, 4, 19), (2, 17)), ((3, 4, 24), (2, 28)), ((3, 4, 29), (2, 34))),
    "CXXABI": (((1, 3, 7), (2, 17)), ((1, 3, 11), (2, 28)), ((1, 3, 13), (2, 34))),
    "GCC": (((4, 8, 0), (2, 17)), ((8, 0, 0), (2, 28)), ((11, 0, 0), (2, 34))),
}


def needs(path: Path) -> dict[str, set[str]]:
    """Library -> symbol versions asked of it, from a 64-bit little-endian ELF file. ValueError for anything else."""
    data = path.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"{path}: not a 64-bit little-endian ELF file")
    table, size, count = (struct.unpack_from(f"<{c}", data, at)[0] for c, at in (("Q", 40), ("H", 58), ("H", 60)))
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * size) for i in range(count)]
    out: dict[str, set[str]] = {}
    for _, kind, _, _, offset, _, link, entries, _, _ in sections:
        if kind != VERNEED:
            continue
        strings = sections[link][4]

        def text(at: int, strings: int = strings) -> str:
            return data[strings + at : data.index(b"\0", strings + at)].decode("ascii")

        for _ in range(entries):
            _, n, file, first, following = struct.unpack_from("<HHIII", data, offset)
            names, at = out.setdefault(text(file), set()), offset + first
            for _ in range(n):
                _, _, _, name, onward = struct.unpack_from("<IHHII", data, at)
                names.add(text(name))
                at += onward
            offset += following
    return out


def glibc_for(name: str) -> tuple[int, int] | None:
    """The glibc of the first policy that promises a symbol version; None where none does."""
    kind, _, number = name.partition("_")
    version = tuple(int(n) for n in number.split(".")) if re.fullmatch(r"\d+(\.\d+)*", number) else None
    if kind == "GLIBC" and version:
        return version[:2]
    return next((glibc for top, glibc in RUNTIME.get(kind, ()) if version and version <= top), None)


def tag(path: Path) -> str:
    """For instance manylinux_2_17_x86_64. ValueError where it needs something that the policies do not promise."""
    highest = FLOOR
    for library, names in needs(path).items():
        if not re.match(r"(lib(c|m|pthread|dl|rt|gcc_s|stdc\+\+)|ld-linux.*)\.so", library):
            raise ValueError(f"{path} needs versions of {library}: no manylinux policy without carrying it")
        for name in names:
            found = glibc_for(name)
            if found is None and name != "GLIBC_PRIVATE":
                raise ValueError(f"{path} needs {name} of {library}: no manylinux policy promises it")
            highest = max(highest, found or FLOOR)
    return f"manylinux_{highest[0]}_{highest[1]}_{platform.machine()}"


if __name__ == "__main__":
    try:
        print(tag(Path(sys.argv[1])))
    except (ValueError, OSError) as error:
        sys.exit(str(error))
