"""One kernel of a template under way: the hooks its text calls, and the text they become.

A template is Jinja over a module of the CuTe DSL. Some hooks know their text only when all others
have been called (a signature lists every buffer that any of them reads): those leave a token on
their line, which `PartialRender` replaces.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2
import torch

from tilewright.gemm.cutedsl.types import named, number
from tilewright.gemm.cutedsl.writer import CSE, Writer
from tilewright.ir import index as ix
from tilewright.ir.expr import INDEX, Expr, sym, syms
from tilewright.ir.program import Buffer, Store, View

IMPORTS = """\
import torch
import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import from_dlpack
import cuda.bindings.driver as cuda
from cutlass._mlir.dialects import math as mlir_math
import operator
from tilewright.gemm.cutedsl import device as tw
"""
MAIN = "main"  # the suffix of the entry that is run unless another is asked for
POSITIONS = ("b", "h", "m", "n", "q_idx", "kv_idx")  # fixed inputs of subgraphs that are positions
_TOKEN = re.compile(r"^( *)(<[A-Z][A-Z_0-9a-z]*>)[ ]*$", re.MULTILINE)
_INLINE = re.compile(r"<[A-Z][A-Z_0-9a-z]*>")
Lines = Callable[[], list[str]]
_CONSTANTS = (bool, int, float, str, torch.dtype, type(None))


class Mistake(NotImplementedError):
    """In a template itself, whatever it is asked for: its author hears of it."""


class _Name(str):
    """`{{kernel_name}}` and `{{kernel_name()}}` are the same."""

    def __call__(self) -> str:
        return str(self)


@dataclass
class PartialRender:
    """Text in which tokens stand for what is not known yet."""

    text: str
    hooks: dict[str, Lines]
    late: frozenset[str] = frozenset()  # tokens whose text depends on what other hooks have met

    def finalize_all(self) -> str:
        """The text, every hook called. A token alone on its line gives its lines' indentation."""
        made = {t: hook() for t, hook in self.hooks.items() if t not in self.late}
        made |= {t: self.hooks[t]() for t in self.hooks if t in self.late}

        def block(found: re.Match[str]) -> str:
            lines = made.get(found[2])
            if lines is None:
                return found[0]
            return "\n".join(found[1] + line for line in lines or ["pass"])

        def inline(found: re.Match[str]) -> str:
            return " ".join(made[found[0]]) if found[0] in made else found[0]

        return _INLINE.sub(inline, _TOKEN.sub(block, self.text))


@dataclass(frozen=True)
class Subgraph:
    """What `modification` writes: a value over named inputs, or stores, or both. An input is a
    `sym` with its name; tensors it loads are memory of the program."""

    value: Expr | None = None
    stores: tuple[Store, ...] = ()
    buffers: tuple[Buffer, ...] = ()


@dataclass(frozen=True)
class Fused:
    """What is fused to a template: values of operands in place of memory, and what is stored of the
    result, over the positions of an element."""

    values: Mapping[int, Expr] = field(default_factory=dict[int, Expr])
    positions: tuple[tuple[Expr, ...], ...] = ()
    place: tuple[Expr, ...] = ()
    product: Expr | None = None  # what stands for the result in the stores
    stores: tuple[Store, ...] = ()
    keeps: bool = True  # the result is itself stored
    memory: Mapping[str, Buffer] = field(default_factory=dict[str, Buffer])


@dataclass
class Args:
    """Names of the entry's parameters."""

    input_buffers: dict[int, str] = field(default_factory=dict[int, str])
    output_buffers: dict[str, str] = field(default_factory=dict[str, str])
    sizes: dict[str, Expr] = field(default_factory=dict[str, Expr])


class CuteDSLTemplateKernel:
    """`input_nodes` and `output_node` are windows on memory."""

    def __init__(self, kernel_name: str, input_nodes: Sequence[View], output_node: View | None,
                 subgraphs: Sequence[Subgraph] = (), fused: Fused | None = None,
                 mutated: Sequence[str] = (), instances: int = 1) -> None:  # fmt: skip
        self.kernel_name = kernel_name
        self.input_nodes = tuple(input_nodes)
        self.output_node = output_node
        self.subgraphs = tuple(subgraphs)
        self.fused = fused or Fused()
        self.mutated = tuple(mutated)  # buffers of inputs that the kernel writes
        self.instances = instances  # calls in one launch, each with memory of its own
        self.args = Args()
        self.cse = CSE()
        self.body: list[str] = []
        self.extra: dict[str, str] = {}  # what hooks read beside the inputs -> its name in the text
        self.symbols: dict[str, Expr] = {}
        self.entries: dict[str, tuple[str, ...]] = {}  # suffix -> names of the inputs
        self.has_store_hook = False
        self.picks = False
        self.hands_on: set[str] = set()  # which of the two hooks for buffers were called
        self.load_hooks: set[int] = set()
        self._params: dict[str, Any] = {}
        self._hooks: dict[str, Lines] = {}
        self._count = 0
        self._digest = ""

    @property
    def constants(self) -> tuple[str, ...]:
        """Names of the choice's parameters."""
        return tuple(self._params)

    # ---- rendering

    def render(self, template: jinja2.Template, **params: Any) -> PartialRender:
        self._params = params
        made = template.render(**self.environment(), **params)
        text = f"{self.gen_imports()}\n{made.strip()}\n"
        self._digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        late = ("DEF_KERNEL", "BUFFERS", "UNPACK", "HASH")
        return PartialRender(text, self._hooks, frozenset(
            t for t in self._hooks if t.strip("<>").startswith(late)))  # fmt: skip

    def environment(self) -> dict[str, Any]:
        """What a template can call."""
        return {
            "kernel_name": _Name(self.kernel_name),
            "input_nodes": self.input_nodes,
            "output_node": self.output_node,
            "def_kernel": self.def_kernel,
            "gen_defines": self.gen_defines,
            "get_output": self.get_output,
            "modification": self.modification,
            "get_tensor_buffers": self.get_tensor_buffers,
            "unpack_buffers": self.unpack_buffers,
            "set_cute_hash": self.set_cute_hash,
            "load_input": self.load_input,
            "store_output": self.store_output,
            "instances": self.instances,
            "pick_instance": self.pick_instance,
        }

    def gen_imports(self) -> str:
        return IMPORTS

    def gen_defines(self, **params: Any) -> str:
        """A constant of the module, or of a function, for each parameter of the choice."""
        chosen = params or self._params
        for name, value in chosen.items():
            parts = value if isinstance(value, tuple | list) else (value,)
            if not name.isidentifier() or not all(isinstance(v, _CONSTANTS) for v in parts):
                raise Mistake(f"{name} = {value!r} is no constant of the text: a parameter has a "
                              "name of Python's, and is a number, a string or a dtype")  # fmt: skip
        return "".join(f"{n}: cutlass.Constexpr = {v!r}\n" for n, v in chosen.items())

    def _token(self, name: str, lines: Lines) -> str:
        token = f"<{name}>"
        self._hooks[token] = lines
        return token

    def _numbered(self, name: str, lines: Lines) -> str:
        self._count += 1
        return self._token(f"{name}_{self._count}", lines)

    # ---- the entry

    def def_kernel(self, *names: str, suffix: str = MAIN) -> str:
        """The head of a function that is called with the inputs, the output, sizes and a stream."""
        if suffix in self.entries:
            raise ValueError(f"def_kernel was called before for the entry {suffix!r}: give the "
                             "second one a suffix of its own")  # fmt: skip
        if len(names) > len(self.input_nodes):
            raise ValueError(f"def_kernel names {len(names)} inputs: there are "
                             f"{len(self.input_nodes)}")  # fmt: skip
        self.entries[suffix] = names
        for k, node in enumerate(self.input_nodes):
            default = f"arg_{names[k]}" if k < len(names) else f"arg_{k}_{node.buffer}"
            self.args.input_buffers.setdefault(k, default)
        if self.output_node is not None:
            name = self.output_node.buffer
            self.args.output_buffers.setdefault(name, f"arg_{name}")
        for node in (*self.input_nodes, *([self.output_node] if self.output_node else [])):
            for e in (*node.size, *node.stride, node.offset):
                self._sizes(e)
        token = "DEF_KERNEL" if suffix == MAIN else f"DEF_KERNEL_{suffix}"
        return self._token(token, lambda: self._head(suffix))

    def _sizes(self, e: Expr) -> None:
        for s in syms(e):
            self.args.sizes[s.arg.name] = s

    def parameters(self) -> list[str]:
        """Of an entry, in order."""
        return [*self.args.input_buffers.values(), *self.args.output_buffers.values(),
                *self._memory(), *self.numbers(), "stream"]  # fmt: skip

    def _memory(self) -> list[str]:
        if self.instances == 1:
            return list(self.extra.values())
        return [f"{m}__{k}" for k in range(self.instances) for m in self.extra.values()]

    def numbers(self) -> list[str]:
        """Sizes and symbols of the call."""
        return sorted({**self.args.sizes, **self.symbols})

    def _head(self, suffix: str) -> list[str]:
        head = f"def {self.kernel_name}_{suffix}({', '.join(self.parameters())}):"
        names = self.entries[suffix]
        return [head, *(f"    {n} = {self.args.input_buffers[k]}" for k, n in enumerate(names))]

    def get_output(self) -> str:
        name = "" if self.output_node is None else self.output_node.buffer
        if name not in self.args.output_buffers:
            raise ValueError(f"the output buffer {name!r} is not an argument yet: def_kernel makes "
                             "it one")  # fmt: skip
        return self.args.output_buffers[name]

    # ---- what hooks read beside the inputs

    def get_tensor_buffers(self) -> str:
        """A list of them, as the entry hands it on."""
        self.hands_on.add("get_tensor_buffers")
        return self._numbered("BUFFERS", lambda: [self._listed()])

    def _listed(self) -> str:
        if self.instances == 1:
            return f"[{', '.join(self._extras())}]"
        each = [", ".join((*(f"{m}__{k}" for m in self.extra.values()), *self.numbers()))
                for k in range(self.instances)]  # fmt: skip
        return f"[{', '.join(f'[{one}]' for one in each)}]"

    def pick_instance(self, *names: str) -> str:
        """In a launch of several calls, what was given under these names becomes that of the call
        whose block this is; alone there is nothing to pick."""
        self.picks = True
        which = "cute.arch.block_idx()[2]"
        made = [f"{n} = tw.pick({which}, {n})" for n in names] if self.instances > 1 else []
        return self._numbered("PICK", lambda: made)

    def _extras(self) -> list[str]:
        return [*self.extra.values(), *self.numbers()]

    def unpack_buffers(self, name: str) -> str:
        """The same list taken apart in a function that it was given to under a name."""
        self.hands_on.add("unpack_buffers")
        return self._numbered(
            "UNPACK", lambda: [f"{v} = {name}[{k}]" for k, v in enumerate(self._extras())]
        )

    def set_cute_hash(self, function: str, suffix: str = "") -> str:
        """Mark a function with the hash of its template, for code that caches by it."""
        return self._numbered(
            "HASH", lambda: [f'{function}.__cute_hash__ = "{self._digest}{suffix}"']
        )

    def memory(self, buffer: str) -> str:
        return self.extra.setdefault(buffer, f"mem_{buffer}")

    def dtype_of(self, buffer: str) -> torch.dtype:
        known = dict(self.fused.memory)
        known |= {b.name: b for g in self.subgraphs for b in g.buffers}
        if buffer in known:
            return known[buffer].dtype
        return next(v.dtype for v in self.input_nodes if v.buffer == buffer)

    def _name(self, e: Expr) -> str:
        self.symbols.setdefault(e.arg.name, e)
        return e.arg.name

    @property
    def is_wide(self) -> bool:
        """Whether positions may need more than 32 bits."""
        known = [ix.value_of(b.numel) for b in self.fused.memory.values()]
        return any(n is None or n >= 1 << 31 for n in known)

    def writer(self, known: Mapping[Expr, str]) -> Writer:
        def name(e: Expr) -> str:
            return known[e] if e in known else self._name(e)

        return Writer(self.cse, name, self.memory, self.is_wide)

    # ---- loads, stores, subgraphs

    def load_input(self, name: str, into: str, *at: str) -> str:
        """Assign an element of an input, or what is fused in its place, to a variable."""
        return self._numbered("LOAD", lambda: self._loaded(name, into, at))

    def _loaded(self, name: str, into: str, at: Sequence[str]) -> list[str]:
        names = next(iter(self.entries.values()), ())
        if name not in names:
            raise ValueError(f"load_input({name!r}): def_kernel names {', '.join(names) or 'none'}")
        which = names.index(name)
        self.load_hooks.add(which)
        rank = len(self.input_nodes[which].size)
        if len(at) != rank:
            raise ValueError(f"load_input({name!r}) takes {rank} positions, not {len(at)}")
        value = self.fused.values.get(which)
        if value is None:
            return [f"{into} = {name}[{', '.join(at)}]"]
        with self.cse.scope():
            w = self.writer(dict(zip(self.fused.positions[which], at, strict=True)))
            made = w.value(value)
            return [*w.lines, f"{into} = {made}"]

    def store_output(self, name: str, value: str, *at: str) -> str:
        """Store an element of the result in the tensor `name`, and what is fused to it."""
        self.has_store_hook = True
        return self._numbered("STORE", lambda: self._stored(name, value, at))

    def _stored(self, name: str, value: str, at: Sequence[str]) -> list[str]:
        node, fused = self.output_node, self.fused
        if node is None:
            raise ValueError("store_output: the template has no output")
        if len(at) != len(node.size):
            raise ValueError(f"store_output takes {len(node.size)} positions, not {len(at)}")
        place = f"{name}[{', '.join(at)}]"
        made = f"tw.to({value}, {named(node.dtype)})"
        if node.dtype == torch.bool:
            made = f"tw.to({made}, cutlass.Uint8)"
        if not fused.stores:
            return [f"{place} = {made}"]
        with self.cse.scope():
            w = self.writer(dict(zip(fused.place, at, strict=True)))
            result = w.let(made)
            if fused.keeps:
                w.lines.append(f"{place} = {result}")
            assert fused.product is not None
            w.know(fused.product, result)
            for store in fused.stores:
                w.store(store, fused.memory[store.buffer].dtype)
            return w.lines

    def _get_subgraph(self, which: int) -> Subgraph:
        assert which < len(self.subgraphs), f"there is no subgraph {which}"
        assert not self.body, "the body of another subgraph is still open"
        return self.subgraphs[which]

    def modification(self, which: int, output_name: str | None, mask: str | None = None,
                     fill: float = 0.0, **fixed: str) -> str:  # fmt: skip
        """Straight-line text of a subgraph over the given expressions; its value goes to a
        variable. Where the mask does not hold nothing of it runs, and the value is the fill."""
        graph = self._get_subgraph(which)
        if output_name is None and not graph.stores:
            raise ValueError(f"modification({which}): its value goes nowhere")
        if output_name is not None and graph.value is None:
            raise ValueError(f"modification({which}): the subgraph has no value")
        lines = self._modified(graph, output_name, fixed)
        if mask is not None:
            start = [] if graph.value is None else [
                f"{output_name} = {number(fill, graph.value.dtype)}"]  # fmt: skip
            lines = [*start, f"if {mask}:", *(f"    {line}" for line in lines)]
        return self._numbered("MODIFICATION", lambda: lines)

    def _modified(self, graph: Subgraph, into: str | None, fixed: Mapping[str, str]) -> list[str]:
        exprs = [] if graph.value is None else [graph.value]
        exprs += [e for s in graph.stores for e in s.exprs]
        memory = {b.name: b for b in graph.buffers}
        known: dict[Expr, str] = {}
        for s in syms(*exprs):
            if s.arg.name in fixed:
                text = fixed[s.arg.name]
                known[s] = text if s.dtype == INDEX else f"tw.to({text}, {named(s.dtype)})"
        with self.cse.scope():
            w = self.writer(known)
            value = "" if graph.value is None else w.value(graph.value)
            for store in graph.stores:
                w.store(store, memory[store.buffer].dtype)
            return w.lines if into is None else [*w.lines, f"{into} = {value}"]


def placeholder(name: str, dtype: torch.dtype | None = None) -> Expr:
    """An input of a subgraph: a position, or a float32 unless said otherwise."""
    kind = dtype or (INDEX if name in POSITIONS else torch.float32)
    return sym(name, kind)
