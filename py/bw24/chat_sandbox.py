"""The jinja2 environment chat templates run in: what they may call, and how much they may compute.

Templates come from model files, so they are hostile until proven otherwise. jinja2's sandbox keeps them from Python's internals; this
module keeps them from running for ever or filling the memory. Two rules do it:
  * every loop turn, call, filter and output looks at the clock;
  * no value larger than MAX_SIZE ever comes into being, so whatever the interpreter does with one in a single step ends soon. Each way to
    make a larger value from smaller ones is checked before it is taken: operators, concatenation, literals, filters, methods of strings.
Refuses to know what a chat is.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from jinja2 import Undefined, nodes, pass_context
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_SIZE = 32 << 20  # of one value: characters, plus NODE for each element of a container
MAX_TOTAL = 512 << 20  # characters made in one rendering, however many of them are dropped again
MAX_PRODUCT = 256 << 20  # bound on (size of a value) * (size or number given to the filter or method that expands it)
MAX_NUMBER = 1 << 20  # of an integer given to a filter or method
MAX_BITS = 4096  # of an integer that an operator makes
NODE = 64  # bounds containers to about half a million elements

_COMPILER_ARGUMENTS = ("_loop_vars", "_block_vars")  # added to calls by jinja2's compiler, taken out again before the call
# Methods of str, and filters, whose result can be much longer than what they are given.
_EXPANDING = {"replace", "join", "ljust", "rjust", "center", "zfill", "expandtabs", "translate"}
_EXPANDING_FILTERS = {"join", "center", "indent", "wordwrap", "urlize", "xmlattr", "truncate", "batch", "slice"}
# Filters that pass containers on as they are; every other one may turn its value into text.
_CONTAINER_FILTERS = {
    "length", "count", "first", "last", "list", "items", "dictsort", "map", "select", "reject", "selectattr", "rejectattr", "sort",
    "unique", "reverse", "min", "max", "sum", "batch", "slice", "groupby", "default", "d", "attr", "random",
}
_WIDE = re.compile(r"\d{5}|\*|\{[^{}]*\{")  # in a format string: a width of 10000 and more, or one taken from an argument


class Limit(TemplateError):
    """A template wants more than the sandbox gives."""


class Budget(threading.local):
    """What is left of the current rendering in this thread: computing time and characters.

    The wall clock is cheap to read, so it is read first; when `deadline` has passed, the thread's own time decides, so that a busy machine
    does not fail a template.
    """

    deadline = float("inf")  # of time.monotonic()
    left = MAX_TOTAL
    seconds = started = 0.0

    def start(self, seconds: float) -> None:
        self.seconds, self.started = seconds, time.thread_time()
        self.deadline, self.left = time.monotonic() + seconds, MAX_TOTAL

    def stop(self) -> None:
        self.deadline, self.left = float("inf"), MAX_TOTAL

    def tick(self) -> None:
        now = time.monotonic()
        if now > self.deadline:
            rest = self.started + self.seconds - time.thread_time()
            if rest < 0:
                raise Limit(f"not finished after {self.seconds:g} s of computing")
            self.deadline = now + rest

    def spend(self, size: int) -> None:
        """Account for a value of `size` about to be made."""
        self.tick()
        if size > MAX_SIZE:
            raise Limit(f"a value of size {size}, the limit is {MAX_SIZE}")
        self.left -= size
        if self.left < 0:
            raise Limit(f"more than {MAX_TOTAL} characters of intermediate text")


def size_of(value: Any) -> int:
    """Size of a value as text would show it: characters, NODE for each element, shared parts counted each time.

    Stops counting past MAX_SIZE. Raises Limit for a namespace inside the value.
    """
    total, work = 0, [value]
    while work:
        item = work.pop()
        if isinstance(item, (str, bytes)):
            total += len(item)
        elif isinstance(item, Mapping):
            total += NODE * 2 * len(item)
            if total <= MAX_SIZE:
                work += item.keys()
                work += item.values()
        elif isinstance(item, (list, tuple, set, frozenset)):
            total += NODE * len(item)
            if total <= MAX_SIZE:
                work += item
        elif isinstance(item, Namespace):
            raise Limit("a namespace inside a value")
        if total > MAX_SIZE:
            break
    return total


def _flat_size(value: Any) -> int:
    """Length of text, the value of an integer, the size of anything else."""
    if isinstance(value, int):
        return abs(value)
    return len(value) if isinstance(value, (str, bytes)) else size_of(value)


class _Rewrite(NodeTransformer):
    """Puts the sandbox's own filters round loops, `~` and literals with computed parts."""

    @staticmethod
    def _wrap(node: nodes.Expr, name: str) -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        node = self.generic_visit(node)
        node.iter = self._wrap(node.iter, "#each")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        node = self.generic_visit(node)
        return self._wrap(nodes.List(node.nodes, lineno=node.lineno), "#concat")

    def visit_Assign(self, node: nodes.Assign) -> nodes.Node:
        node = self.generic_visit(node)
        if isinstance(node.target, nodes.NSRef) or node.target.find(nodes.NSRef) is not None:
            node.node = self._wrap(node.node, "#made")
        return node

    def _literal(self, node: nodes.Expr) -> nodes.Node:
        node = self.generic_visit(node)
        try:
            node.as_const()
        except nodes.Impossible:
            return self._wrap(node, "#made")
        return node

    visit_List = visit_Dict = _literal

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self._literal(node) if node.ctx == "load" else node


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`: marks what the model wrote, for training; here its content only."""

    tags = {"generation"}

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Environment(ImmutableSandboxedEnvironment):
    """jinja2 set up as Hugging Face's transformers does, with the limits above."""

    intercepted_binops = frozenset(("+", "*", "%", "**"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
        self.budget = Budget()
        self.finalize = self._finalize
        self.globals.pop("lipsum", None)
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        self.filters["tojson"] = self._to_json
        self.filters = {name: self._guarded(name, function) for name, function in self.filters.items()}
        self.filters |= {"#each": self._internal(self._each), "#concat": self._internal(self._concat), "#made": self._internal(self._made)}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Rewrite().visit(super()._parse(source, name, filename))

    # ---- what the rewritten template calls ----

    @staticmethod
    def _internal(function: Callable) -> Callable:
        # a filter that takes the context is never evaluated while the template is compiled
        @pass_context
        def internal(_context: Any, value: Any) -> Any:
            return function(value)

        return internal

    def _each(self, values: Iterable) -> Iterator:
        for value in values:
            self.budget.tick()
            yield value

    def _concat(self, values: list) -> str:
        self.budget.spend(sum(map(size_of, values)))
        return "".join(map(str, values))

    def _made(self, value: Any) -> Any:
        self.budget.spend(size_of(value))
        return value

    def concat(self, parts: Iterable[str]) -> str:
        """Joins output pieces: of macros, of block assignments, of filter blocks."""
        out: list[str] = []
        size = 0
        for part in parts:
            size += len(part)
            self.budget.spend(len(part))
            if size > MAX_SIZE:
                raise Limit(f"a value of size {size}, the limit is {MAX_SIZE}")
            out.append(part)
        return "".join(out)

    def _finalize(self, value: Any) -> Any:
        """Called with every value that is printed."""
        self.budget.spend(len(value) if isinstance(value, str) else size_of(value))
        return value

    # ---- operators, calls, filters ----

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.budget.tick()
        if operator == "%" and isinstance(left, (str, bytes)):
            self._check_format(left, right if isinstance(right, (tuple, list)) else [right])
        elif operator in "+*":
            self._check_sum(operator, left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > MAX_BITS:
            raise Limit(f"an integer of more than {MAX_BITS} bits")
        return super().call_binop(context, operator, left, right)

    def _check_sum(self, operator: str, left: Any, right: Any) -> None:
        sized = [v for v in (left, right) if isinstance(v, (str, bytes, list, tuple))]
        if operator == "+" and len(sized) == 2:
            self.budget.spend(_flat_size(left) + _flat_size(right))
        elif operator == "*" and len(sized) == 1:
            count = right if sized[0] is left else left
            self.budget.spend(_flat_size(sized[0]) * max(count, 0) if isinstance(count, int) else 0)
        elif operator == "*" and isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MAX_BITS:
            raise Limit(f"an integer of more than {MAX_BITS} bits")

    def _check_format(self, pattern: str | bytes, arguments: Iterable) -> None:
        text = pattern if isinstance(pattern, str) else pattern.decode("latin-1")
        if _WIDE.search(text):
            raise Limit("a format with a width of 10000 and more, or a computed one")
        fields = text.count("%") + text.count("{")
        self.budget.spend(len(text) + fields * 10000 + fields * max((size_of(a) for a in arguments), default=0))

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
        self.budget.tick()
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, (str, bytes, int, float, list, tuple)):
            args = self._checked_method(owner, name, args, [v for k, v in kwargs.items() if k not in _COMPILER_ARGUMENTS])
        else:
            self._check_arguments(obj, args, kwargs)
        result = super().call(context, obj, *args, **kwargs)
        if isinstance(result, (str, bytes)):
            self.budget.spend(len(result))
        elif isinstance(result, (list, tuple, dict)) and size_of(result) > MAX_SIZE:
            raise Limit("a container that is too large")
        return result

    @staticmethod
    def _check_arguments(obj: Any, args: tuple, kwargs: dict) -> None:
        """Macros, dict(), namespace() and cycler() build containers of their arguments.

        Namespaces may be given to macros, but are not part of any value: so no chain of them can stand for an endless text.
        """
        values = [*args, *(v for k, v in kwargs.items() if k not in _COMPILER_ARGUMENTS)]
        if isinstance(obj, Macro):
            values = [v for v in values if not isinstance(v, Namespace)]
        if size_of(values) > MAX_SIZE:
            raise Limit("arguments that are too large")

    def wrap_str_format(self, value: Any) -> Callable | None:
        """jinja2's sandboxed `str.format` and `str.format_map`, behind the limits."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            values = args[0].values() if value.__name__ == "format_map" and args and isinstance(args[0], Mapping) else args
            self._check_format(value.__self__, (*values, *kwargs.values()))
            return wrapped(*args, **kwargs)

        return checked

    def _checked_method(self, owner: Any, name: str, args: tuple, named: list) -> tuple:
        """The arguments of a built-in method, iterators made lists. Raises Limit for a call that would make too much of them."""
        self._check_numbers(name, (*args, *named))
        if not isinstance(owner, (str, bytes)):
            return args
        if name == "replace" and len(args) >= 2 and isinstance(args[0], type(owner)) and isinstance(args[1], type(owner)):
            self.budget.spend(len(owner) + owner.count(args[0]) * len(args[1]))
        elif name in _EXPANDING:
            args = tuple(self._listed(a) for a in args)
            self._check_product(owner, args)
            self.budget.spend(sum(map(size_of, args)))
        return args

    def _listed(self, value: Any) -> Any:
        """An iterator's items as a list of limited size; anything else as it is."""
        if not isinstance(value, Iterator):
            return value
        out, size = [], 0
        for item in value:
            size += size_of(item)
            self.budget.tick()
            if size > MAX_SIZE:
                raise Limit(f"a value of size {size}, the limit is {MAX_SIZE}")
            out.append(item)
        return out

    @staticmethod
    def _check_numbers(name: str, values: Iterable) -> None:
        for value in values:
            if isinstance(value, int) and abs(value) > MAX_NUMBER:
                raise Limit(f"{name}: the number {value:.6g} is out of range" if abs(value) < 10**300 else f"{name}: a number out of range")

    @staticmethod
    def _check_product(value: Any, args: Iterable) -> None:
        product = _flat_size(value) * max(map(_flat_size, args), default=1)
        if product > MAX_PRODUCT:
            raise Limit(f"an expansion by a factor that may give {product} characters")

    def _guarded(self, name: str, function: Callable) -> Callable:
        """A filter behind the limits; it keeps its marks (whether it takes the context, the environment)."""
        passes = getattr(function, "jinja_pass_arg", None)

        def guarded(*args: Any, **kwargs: Any) -> Any:
            first = 0 if passes is None else 1
            value, rest = args[first], (*args[first + 1 :], *kwargs.values())
            self.budget.tick()
            self._check_numbers(name, rest)
            if name in _EXPANDING_FILTERS or name == "replace":
                value = self._listed(value)
                args = (*args[:first], value, *args[first + 1 :])
            self._check_filter(name, value, rest)
            result = function(*args, **kwargs)
            if isinstance(result, (str, bytes)):
                self.budget.spend(len(result))
            elif isinstance(result, (list, tuple, dict)):
                self.budget.spend(size_of(result))
            return result

        if passes is not None:
            guarded.jinja_pass_arg = passes
        return guarded

    def _check_filter(self, name: str, value: Any, rest: tuple) -> None:
        if name == "replace":
            old, new = [str(v) for v in (*rest, "", "")[:2]]
            self.budget.spend(size_of(value) + str(value).count(old) * len(new))
        elif name == "format":
            self._check_format(str(value), rest)
        elif name == "sum" and not all(isinstance(v, (int, float, str, Undefined)) or v is None for v in rest):
            raise Limit("sum: a start that is no number")
        elif name == "map" and not all(isinstance(v, (str, int, float, Undefined)) or v is None for v in rest):
            raise Limit("map: an argument that is a container")
        elif name == "round" and any(isinstance(v, int) and v > 1000 for v in rest):
            raise Limit("round: a precision of more than 1000")
        elif name in _EXPANDING_FILTERS:
            self._check_product(value, rest)
        if name not in _CONTAINER_FILTERS and not isinstance(value, str):
            self.budget.spend(size_of(value))

    def _to_json(self, value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
        """Hugging Face's `tojson`: no HTML escapes. Written piece by piece, so that the limits hold."""
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        return self.concat(encoder.iterencode(value))


def _raise_exception(message: Any) -> None:
    raise TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    if _WIDE.search(pattern) or len(pattern) > 1000:
        raise Limit("strftime_now: a width of 10000 and more")
    return datetime.now().strftime(pattern)
