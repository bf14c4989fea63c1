"""From the entry of a rendered template to one function of pointers and integers.

An entry is a Python function over tensors that calls `@cute.jit` functions: `def_kernel` writes its
head. It is run once, on descriptions of the tensors, and what it calls becomes a function that the
DSL compiles: so a launch runs no Python of the template's, sizes known only at run time are
arguments, and the library needs the DSL no more.
"""

from __future__ import annotations

import ast
import builtins
import re
import symtable
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.gemm.cutedsl.build import Argument, Number, Pointer
from tilewright.gemm.cutedsl.kernel import MAIN, CuteDSLTemplateKernel, Mistake
from tilewright.gemm.cutedsl.types import memory
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr
from tilewright.ir.program import View
from tilewright.ir.show import number

FLAT = "flat"
_FAR = 1 << 30  # extent of memory that hooks read by position


@dataclass(frozen=True)
class Rendered:
    """A module's text, the function in it to compile, and what that is called with: (kind, buffer
    or symbol), and its type."""

    text: str
    entry: str
    params: tuple[tuple[tuple[str, str], Argument], ...]


class Text:
    """An expression of the flat function; it is combined with others as text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __getattr__(self, name: str) -> Text:
        if name.startswith("__"):
            raise AttributeError(name)
        return Text(f"{self.text}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Text:
        given = [shown(a) for a in args] + [f"{k}={shown(v)}" for k, v in kwargs.items()]
        return Text(f"{self.text}({', '.join(given)})")

    def __getitem__(self, item: Any) -> Text:
        return Text(f"{self.text}[{shown(item)}]")

    def __add__(self, other: Any) -> Text:
        return Text(f"({self.text} + {shown(other)})")

    def __sub__(self, other: Any) -> Text:
        return Text(f"({self.text} - {shown(other)})")

    def __mul__(self, other: Any) -> Text:
        return Text(f"({self.text} * {shown(other)})")

    def __floordiv__(self, other: Any) -> Text:
        return Text(f"({self.text} // {shown(other)})")

    def __mod__(self, other: Any) -> Text:
        return Text(f"({self.text} % {shown(other)})")

    def __radd__(self, other: Any) -> Text:
        return Text(f"({shown(other)} + {self.text})")

    def __rmul__(self, other: Any) -> Text:
        return Text(f"({shown(other)} * {self.text})")

    def __bool__(self) -> bool:
        raise Mistake(
            f"an entry depends on {self.text}, which is known only at run time: decide inside the "
            "@cute.jit function"
        )


class Described:
    """A tensor to the entry: what it is, and nothing in it."""

    def __init__(self, name: str, view: View) -> None:
        self.name, self.view, self.dtype = name, view, view.dtype

    @property
    def shape(self) -> tuple[Any, ...]:
        return tuple(_size(e) for e in self.view.size)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def stride(self, dim: int | None = None) -> Any:
        every = tuple(_size(e) for e in self.view.stride)
        return every if dim is None else every[dim]

    def dim(self) -> int:
        return len(self.view.size)

    ndim = property(dim)

    def detach(self) -> Described:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Mistake(
            f"an entry uses {name!r} of a tensor: it may ask for shape, stride(), dtype, and give "
            "it to from_dlpack; the rest belongs into the @cute.jit function"
        )


class Converted(Text):
    """What `from_dlpack` makes of a tensor. How dynamic its layout is follows from the program."""

    def mark_layout_dynamic(self, leading_dim: int | None = None) -> Converted:
        return self

    def mark_compact_shape_dynamic(self, *args: Any, **kwargs: Any) -> Converted:
        return self


def shown(value: Any) -> str:
    match value:
        case Text():
            return value.text
        case Described():
            return f"t_{value.name}"
        case list():
            return "[" + ", ".join(shown(v) for v in value) + "]"
        case tuple():
            return "(" + "".join(f"{shown(v)}, " for v in value) + ")"
        case bool() | int() | float() | str() | None:
            return repr(value)
        case _:
            raise Mistake(f"an entry passes on a {type(value).__name__}")


def _size(e: Expr) -> Any:
    known = ix.value_of(e)
    return Text(number(e)) if known is None else known


def flattened(kernel: CuteDSLTemplateKernel, text: str, suffix: str = MAIN) -> Rendered:
    """The rendered text with the flat function of one of its entries."""
    return _Flat(kernel, text, suffix).rendered()


def undefined(text: str) -> list[str]:
    """Names that a module uses and nothing in it defines."""
    module = symtable.symtable(text, "<template>", "exec")
    if re.search(r"^\s*from .* import \*", text, re.MULTILINE):
        return []  # who knows
    known = {s.get_name() for s in module.get_symbols()
             if s.is_assigned() or s.is_imported() or s.is_namespace()}  # fmt: skip
    found: list[str] = []
    tables = [module]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        found += [s.get_name() for s in table.get_symbols()
                  if s.is_referenced() and (s.is_global() or table is module)]  # fmt: skip
    return sorted(n for n in {*found} - known if not hasattr(builtins, n))


class _Flat:
    def __init__(self, kernel: CuteDSLTemplateKernel, text: str, suffix: str) -> None:
        self.kernel, self.text = kernel, text
        self.name = f"{kernel.kernel_name}_{suffix}"
        self.module = ast.parse(text)
        self.pointers: dict[str, Pointer] = {}
        self.calls: list[str] = []

    def rendered(self) -> Rendered:
        entry = self._entry()
        missing = undefined(self.text)
        if missing:
            raise Mistake(
                f"the text uses {', '.join(missing)}, which nothing in it defines (parameters of "
                f"the choice: {', '.join(self.kernel.constants) or 'none'})"
            )
        lines = self._tensors()
        self._run(entry)
        if not self.calls:
            raise Mistake(f"{self.name} calls no @cute.jit function")
        numbers = self.kernel.numbers()
        kinds = {n: Number("Int32") for n in numbers}
        flat = f"{self.name}_{FLAT}"
        params = [*(f"p_{b}: cute.Pointer" for b in self.pointers),
                  *(f"{n}: cutlass.{kinds[n].kind}" for n in numbers),
                  "stream: cuda.CUstream"]  # fmt: skip
        made = ["@cute.jit", f"def {flat}({', '.join(params)}):",
                *(f"    {line}" for line in (*lines, *self.calls))]  # fmt: skip
        given = [*((("ptr", b), p) for b, p in self.pointers.items()),
                 *((("int", n), kinds[n]) for n in numbers)]  # fmt: skip
        return Rendered(self._without_entries() + "\n\n" + "\n".join(made) + "\n", flat,
                        tuple(given))  # fmt: skip

    # ---- the text

    def _functions(self) -> dict[str, ast.FunctionDef]:
        return {n.name: n for n in self.module.body if isinstance(n, ast.FunctionDef)}

    def _entry(self) -> ast.FunctionDef:
        found = self._functions().get(self.name)
        if found is None:
            known = ", ".join(sorted(self._functions())) or "none"
            raise RuntimeError(f"the template has no function {self.name}; it has {known}")
        return found

    def _without_entries(self) -> str:
        """Entries are run here and now; what is compiled is the rest."""
        gone: set[int] = set()
        for suffix in self.kernel.entries:
            node = self._functions().get(f"{self.kernel.kernel_name}_{suffix}")
            if node is not None:
                gone |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        kept = [line for k, line in enumerate(self.text.splitlines(), 1) if k not in gone]
        return "\n".join(kept).rstrip()

    def _run(self, entry: ast.FunctionDef) -> None:
        names: dict[str, Any] = {n: self._jit(n) for n in self._functions()}
        for node in self.module.body:  # constants, and whatever else the module imports
            if isinstance(node, ast.AnnAssign | ast.Assign):
                self._constant(node, names)
        names |= {"torch": torch, "cutlass": Text("cutlass"), "cute": Text("cute"),
                  "cuda": _Cuda(), "from_dlpack": _converted, "operator": Text("operator"),
                  "tw": Text("tw")}  # fmt: skip
        lone = ast.Module([entry], [])
        exec(compile(lone, f"<entry {self.name}>", "exec"), names)
        try:
            names[self.name](*self._described())
        except (TypeError, NameError, AttributeError) as error:
            raise Mistake(
                f"the entry {self.name} fails: {error}. It is run once, on descriptions of tensors "
                "(shape, stride(), dtype), and calls @cute.jit functions of the text"
            ) from error

    def _constant(self, node: ast.AnnAssign | ast.Assign, names: dict[str, Any]) -> None:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
        if node.value is None or not all(isinstance(t, ast.Name) for t in targets):
            return
        try:
            value = ast.literal_eval(node.value)
        except ValueError:
            value = None
        for t in targets:
            assert isinstance(t, ast.Name)
            names[t.id] = Text(t.id) if value is None else value

    def _jit(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> None:
            self.calls.append(Text(name)(*args, **kwargs).text)

        return call

    # ---- arguments

    def _described(self) -> list[Any]:
        k = self.kernel
        inputs = [Described(name, k.input_nodes[i]) for i, name in k.args.input_buffers.items()]
        outputs = [] if k.output_node is None else [
            Described(name, k.output_node) for name in k.args.output_buffers.values()]  # fmt: skip
        rest = [Text(name) for name in k.parameters()[len(inputs) + len(outputs) :]]
        return [*inputs, *outputs, *rest]

    def _tensors(self) -> list[str]:
        """The tensors of a call; of several in one launch lists of them."""
        count = self.kernel.instances
        if count == 1:
            return self._of_one("")
        lines = [line for k in range(count) for line in self._of_one(f"__{k}")]
        every = (
            *self.kernel.args.input_buffers.values(),
            *self.kernel.args.output_buffers.values(),
        )
        return lines + [
            f"t_{n} = [{', '.join(f't_{n}__{k}' for k in range(count))}]" for n in every
        ]

    def _of_one(self, which: str) -> list[str]:
        k = self.kernel
        lines: list[str] = []
        for i, name in k.args.input_buffers.items():
            lines.append(self._tensor(name, k.input_nodes[i], i in k.fused.values, which))
        for name in k.args.output_buffers.values():
            assert k.output_node is not None
            lines.append(self._tensor(name, k.output_node, not k.fused.keeps, which))
        for buffer, name in k.extra.items():
            dtype = k.dtype_of(buffer)
            self.pointers.setdefault(f"{buffer}{which}", Pointer(dtype))
            lines.append(f"{name}{which} = cute.make_tensor(p_{buffer}{which}, "
                         f"cute.make_layout(({_FAR},), stride=(1,)))")  # fmt: skip
        return lines

    def _tensor(self, name: str, view: View, absent: bool, which: str) -> str:
        """A window on memory; what is fused away has a shape, and no memory."""
        if absent:
            start = f"cute.make_ptr(cutlass.{memory(view.dtype)}, 0, cute.AddressSpace.gmem)"
        else:
            self.pointers.setdefault(f"{view.buffer}{which}", Pointer(view.dtype))
            start = f"p_{view.buffer}{which}"
            if view.offset is not ix.ZERO:
                start += f" + {number(view.offset)}"
        size = _tuple([number(e) for e in view.size])
        stride = _tuple([_step(e, view.dtype) for e in view.stride])
        layout = f"cute.make_layout({size}, stride={stride})"
        return f"t_{name}{which} = cute.make_tensor({start}, {layout})"


def _step(e: Expr, dtype: torch.dtype) -> str:
    """A stride, with what is known of it for sure: how many elements it is a multiple of."""
    if ix.value_of(e) is not None:
        return number(e)
    whole = max(1, 16 // dtype.itemsize)
    known = whole > 1 and ix.mod(e, whole) is ix.ZERO
    text = f"cutlass.Int64({number(e)})"
    return f"cute.assume({text}, divby={whole})" if known else text


def _tuple(items: Sequence[str]) -> str:
    return "(" + "".join(f"{item}, " for item in items).strip() + ")"


class _Cuda:
    def CUstream(self, stream: Any) -> Any:
        return stream


def _converted(tensor: Any, *args: Any, **kwargs: Any) -> Converted:
    return Converted(shown(tensor))
