"""Which arguments a Triton kernel reads and writes, found in its own IR.

The kernel is brought to Triton's first IR, with the functions it calls put in their places. Every
pointer in there comes from arguments: the sets of them flow along operations, loops and branches
until nothing changes. A store writes the arguments its pointer comes from. An operation that is not
known to leave memory alone, or a pointer that comes from nowhere, counts as the worst it could be.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tilewright.graph.overwrites import Blocks, overwritten
from tilewright.graph.user_kernels import Parameter, Setting, Unmovable, UserKernel, literal

log = logging.getLogger("tilewright.graph")

CAPABILITY = 90  # what is written does not depend on the card; this one knows every operation

TYPES = {
    torch.bool: "i1", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32",
    torch.int64: "i64", torch.uint8: "u8", torch.uint16: "u16", torch.uint32: "u32",
    torch.uint64: "u64", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32",
    torch.float64: "fp64", torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5",
    torch.float8_e4m3fnuz: "fp8e4b8", torch.float8_e5m2fnuz: "fp8e5b16",
}  # fmt: skip


@dataclass(frozen=True)
class Accesses:
    """Names of arguments; `reason` says why all of them are named, where nothing was found out.
    `blocks` are known of arguments that a kernel of one setting writes block by block."""

    reads: frozenset[str]
    writes: frozenset[str]
    reason: str = ""
    blocks: Mapping[str, Blocks] = field(default_factory=dict[str, Blocks])


def accesses(kernel: UserKernel, live: Any, given: Mapping[str, Any],
             descriptors: Mapping[str, Sequence[int]] | None = None) -> Accesses:  # fmt: skip
    """`given` are the arguments by name: tensors (fake ones do), numbers, constants. Tensors that
    are given as descriptors have the block they are read in."""
    pointers = tuple(p.name for p in kernel.parameters
                     if isinstance(given.get(p.name), torch.Tensor))  # fmt: skip
    reads: set[str] = set()
    writes: set[str] = set()
    blocks: Mapping[str, Blocks] = {}
    try:
        for setting in _different(kernel.settings):
            constants = dict(setting.constants)
            types, values = _signature(kernel.parameters, {**given, **constants},
                                       descriptors or {})  # fmt: skip
            found = _found(kernel, live, types, values, pointers)
            reads |= found.reads
            writes |= found.writes
            blocks = found.blocks if len(kernel.settings) == 1 else {}
    except Exception as error:  # whatever a kernel that does not compile may raise
        why = f"{type(error).__name__}: {str(error).splitlines()[-1] if str(error) else ''}"
        log.info("what %s writes to is not known: %s", kernel.name, why)
        return Accesses(frozenset(pointers), frozenset(pointers), why)
    return Accesses(frozenset(reads), frozenset(writes), blocks=blocks)


def _different(settings: Sequence[Setting]) -> Iterator[Setting]:
    """Settings that may make a kernel write elsewhere: not those that are other block sizes."""
    seen: set[str] = set()
    for setting in settings:
        key = repr([(n, "size" if type(v) is int and v > 1 else v) for n, v in setting.constants])
        if key not in seen:
            seen.add(key)
            yield setting


def _signature(parameters: Sequence[Parameter], given: Mapping[str, Any],
               descriptors: Mapping[str, Sequence[int]]
               ) -> tuple[dict[str, str], dict[str, Any]]:  # fmt: skip
    """The types of a kernel's parameters, and the values of those it is compiled for."""
    types: dict[str, str] = {}
    values: dict[str, Any] = {}
    for p in parameters:
        value = given[p.name]
        if p.constexpr or value is None or isinstance(value, str):
            types[p.name], values[p.name] = "constexpr", value
        elif p.name in descriptors:
            types[p.name] = f"tensordesc<{TYPES[value.dtype]}{list(descriptors[p.name])}>"
        else:
            types[p.name] = p.type or type_of(value)
    return types, values


def type_of(value: Any) -> str:
    match value:
        case torch.Tensor():
            return f"*{TYPES[value.dtype]}"
        case bool() | torch.SymBool():
            return "i1"
        case int():
            return "i32" if -(2**31) <= value < 2**31 else "i64" if value < 2**63 else "u64"
        case torch.SymInt():
            return "i32"
        case float() | torch.SymFloat():
            return "fp32"
        case _:
            raise Unmovable(f"an argument of type {type(value).__name__}")


_known: dict[str, Accesses] = {}


def _found(kernel: UserKernel, live: Any, types: dict[str, str], values: dict[str, Any],
           pointers: tuple[str, ...]) -> Accesses:  # fmt: skip
    key = ""
    if kernel.text:
        key = repr((kernel.text, types, [(n, literal(v)) for n, v in values.items()]))
    if not key or key not in _known:
        made = module(live, types, values)
        found = replace(
            _analysed(made, pointers),
            blocks=overwritten(str(made), [n for n, kind in types.items() if kind != "constexpr"]),
        )
        if not key:
            return found
        _known[key] = found
    return _known[key]


def module(live: Any, types: Mapping[str, str], values: Mapping[str, Any]) -> Any:
    """A kernel in Triton's first IR; what it calls is inlined."""
    import triton
    from triton._C.libtriton import ir, passes
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    while not hasattr(live, "params"):
        live = live.fn
    target = GPUTarget("cuda", CAPABILITY, 32)
    backend: Any = triton.compiler.compiler.make_backend(target)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on defaults of options: nothing is generated here
        options = backend.parse_options({})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(live, dict(types), dict(values))
    made: Any = source.make_ir(target, options, backend.get_codegen_implementation(options),
                               backend.get_module_map(), context)  # fmt: skip
    manager = ir.pass_manager(context)
    passes.common.add_inliner(manager)
    passes.common.add_canonicalizer(manager)
    manager.run(made, "tilewright")
    made.context = context  # it must outlive the module
    return made


# ---- the IR as lists


@dataclass
class _Block:
    arguments: list[int]
    region: int
    last: _Op | None = None  # its terminator


@dataclass
class _Op:
    name: str
    operands: list[int]
    results: list[int]
    regions: list[int]
    region: int  # the one it is in
    callee: str = ""


@dataclass
class _Function:
    """All of a module, flat: values are numbers, and so are regions."""

    ops: list[_Op] = field(default_factory=list[_Op])
    blocks: dict[int, _Block] = field(default_factory=dict[int, _Block])
    pointers: set[int] = field(default_factory=set[int])  # values that are or hold pointers
    entries: dict[str, _Block] = field(default_factory=dict[str, _Block])  # of functions
    returns: dict[str, list[_Op]] = field(default_factory=dict[str, list[_Op]])
    public: str = ""

    def inside(self, region: int) -> list[_Block]:
        return [b for b in self.blocks.values() if b.region == region]


def _read(module: Any) -> _Function:
    made = _Function()
    waiting: dict[int, list[_Op]] = {}  # returns by region

    def value(v: Any) -> int:
        number = v.id()
        if "ptr<" in (kind := str(v.get_type())) or "tensordesc<" in kind:
            made.pointers.add(number)
        return number

    def visit(op: Any) -> None:  # innermost first
        name = op.get_name()
        block = op.get_block()
        region = -1
        found: _Block | None = None
        if block is not None:
            parent = block.get_parent()
            region = parent.id() if parent is not None else -1
            found = made.blocks.get(block.id())
            if found is None:
                arguments = [value(block.get_argument(k)) for k in range(block.get_num_arguments())]
                found = made.blocks[block.id()] = _Block(arguments, region)
        one = _Op(name, [value(op.get_operand(k)) for k in range(op.get_num_operands())],
                  [value(op.get_result(k)) for k in range(op.get_num_results())],
                  [op.get_region(k).id() for k in range(op.get_num_regions())], region)  # fmt: skip
        if found is not None:
            found.last = one
        if name == "tt.return":
            waiting.setdefault(region, []).append(one)
        elif name == "tt.call":
            one.callee = op.get_flat_symbol_ref_attr("callee")
        elif name == "tt.func":
            _enter(made, op.get_str_attr("sym_name"), one.regions[0], waiting)
            if op.get_str_attr("sym_visibility") != "private":
                made.public = op.get_str_attr("sym_name")
        made.ops.append(one)

    module.walk(visit)
    return made


def _enter(made: _Function, name: str, region: int, returns: dict[int, list[_Op]]) -> None:
    blocks = made.inside(region)
    if blocks:  # a declaration has none
        made.entries[name] = blocks[0]
        made.returns[name] = returns.get(region, [])


# ---- where pointers flow

# Operations whose pointer results are made of their pointer operands.
FORWARD = frozenset((
    "tt.addptr", "tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans",
    "tt.bitcast", "tt.advance", "tt.make_tensor_ptr", "tt.make_tensor_descriptor", "tt.join",
    "tt.cat", "tt.split", "tt.unsplat", "arith.select", "builtin.unrealized_conversion_cast",
    "ub.poison", "tt.reinterpret_tensor_descriptor",
))  # fmt: skip
# Of the others, those that do nothing to memory.
QUIET = frozenset((
    "arith.cmpi", "tt.return", "tt.call", "tt.func", "scf.yield", "scf.condition", "scf.for",
    "scf.if", "scf.while", "cf.br", "cf.cond_br", "builtin.module",
))  # fmt: skip
READ = frozenset(("tt.load", "tt.descriptor_load", "tt.descriptor_gather"))
WRITE = frozenset(("tt.store", "tt.descriptor_store", "tt.descriptor_scatter"))
# They go through their first operand alone; what else they are given is data.


class _Flow:
    """For each pointer the arguments it may come from, as bits."""

    def __init__(self, function: _Function, arguments: int) -> None:
        self.function = function
        self.all = (1 << arguments) - 1
        self.bits: dict[int, int] = {}
        self.next: dict[int, set[int]] = {}
        self.reads = 0
        self.writes = 0

    def edge(self, source: int, to: int) -> None:
        if source in self.function.pointers and to in self.function.pointers:
            self.next.setdefault(source, set()).add(to)

    def edges(self, sources: Sequence[int], to: Sequence[int]) -> None:
        """From each to the one at the same place."""
        for a, b in zip(sources, to, strict=False):
            self.edge(a, b)

    def connect(self, op: _Op) -> None:
        special: Callable[[_Flow, _Op], None] | None = _CONTROL.get(op.name)
        if special is not None:
            special(self, op)
            return
        inside = [b for r in op.regions for b in self.function.inside(r)]
        sources = [*op.operands, *(v for b in inside if b.last is not None
                                   for v in b.last.operands)]  # fmt: skip
        for to in (*op.results, *(v for b in inside for v in b.arguments)):
            for source in sources:
                self.edge(source, to)
            if op.name not in FORWARD and not inside and to in self.function.pointers:
                self.start(to, self.all)

    def start(self, value: int, bits: int) -> None:
        self.bits[value] = self.bits.get(value, 0) | bits

    def run(self) -> None:
        waiting = list(self.bits)
        while waiting:
            value = waiting.pop()
            for to in self.next.get(value, ()):
                more = self.bits.get(to, 0) | self.bits[value]
                if more != self.bits.get(to, 0):
                    self.bits[to] = more
                    waiting.append(to)

    def touch(self, op: _Op) -> None:
        used = [v for v in op.operands if v in self.function.pointers]
        if not used or op.name in FORWARD or op.name in QUIET:
            return
        through = self.bits.get(op.operands[0], self.all)
        known = op.name in READ or op.name in WRITE
        if known and used == [op.operands[0]]:
            self.reads |= through if op.name in READ else 0
            self.writes |= through if op.name in WRITE else 0
            return
        everything = functools.reduce(lambda a, v: a | self.bits.get(v, self.all), used, 0)
        self.reads |= everything
        self.writes |= everything


def _for(flow: _Flow, op: _Op) -> None:
    (body,) = flow.function.inside(op.regions[0])
    carried = body.arguments[1:]
    for sources in (op.operands[3:], body.last.operands if body.last is not None else []):
        flow.edges(sources, carried)
        flow.edges(sources, op.results)


def _if(flow: _Flow, op: _Op) -> None:
    for block in (b for r in op.regions for b in flow.function.inside(r)):
        if block.last is not None:
            flow.edges(block.last.operands, op.results)


def _while(flow: _Flow, op: _Op) -> None:
    (before,), (after,) = (flow.function.inside(r) for r in op.regions)
    flow.edges(op.operands, before.arguments)
    if before.last is not None:
        flow.edges(before.last.operands[1:], after.arguments)
        flow.edges(before.last.operands[1:], op.results)
    if after.last is not None:
        flow.edges(after.last.operands, before.arguments)


def _call(flow: _Flow, op: _Op) -> None:
    entry = flow.function.entries.get(op.callee)
    if entry is None:
        raise Unmovable(f"{op.callee} is called and not there")
    flow.edges(op.operands, entry.arguments)
    for end in flow.function.returns[op.callee]:
        flow.edges(end.operands, op.results)


def _jump(flow: _Flow, op: _Op) -> None:
    """Where to is not asked: every block of the function may be meant."""
    for block in flow.function.inside(op.region):
        for to in block.arguments:
            for source in op.operands:
                flow.edge(source, to)


def _nothing(flow: _Flow, op: _Op) -> None:
    return


_CONTROL: dict[str, Callable[[_Flow, _Op], None]] = {
    "scf.for": _for, "scf.if": _if, "scf.while": _while, "tt.call": _call, "cf.br": _jump,
    "cf.cond_br": _jump, "tt.func": _nothing, "builtin.module": _nothing,
}  # fmt: skip


def _analysed(module: Any, pointers: tuple[str, ...]) -> Accesses:
    function = _read(module)
    entry = function.entries[function.public]
    arguments = [v for v in entry.arguments if v in function.pointers]
    if len(arguments) != len(pointers):
        raise Unmovable(f"{len(arguments)} pointers for {len(pointers)} tensors")
    flow = _Flow(function, len(arguments))
    for k, value in enumerate(arguments):
        flow.start(value, 1 << k)
    for op in function.ops:
        flow.connect(op)
    flow.run()
    for op in function.ops:
        flow.touch(op)

    def names(bits: int) -> frozenset[str]:
        return frozenset(n for k, n in enumerate(pointers) if bits >> k & 1)

    return Accesses(names(flow.reads), names(flow.writes))
