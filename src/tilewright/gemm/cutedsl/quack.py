"""Products by the Hopper kernel of `quack-kernels`: persistent, warp-specialised, TMA and wgmma.

The kernel is the library's, called inside a function of ours: so what follows the product is our
text, sizes may be known only at run time, and what is compiled is a kernel like any other of the
store. Without the package there is a reason, not an error.
"""

from __future__ import annotations

import functools
import importlib.metadata
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilewright.gemm.cutedsl import toolchain
from tilewright.gemm.cutedsl.build import Argument as Kind
from tilewright.gemm.cutedsl.build import Number, Pointer, Request
from tilewright.gemm.cutedsl.epilogue import Beside, Epilogue, steps, translated
from tilewright.gemm.cutedsl.kernel import IMPORTS
from tilewright.gemm.cutedsl.resort import Resort
from tilewright.gemm.cutedsl.source import CuteSource
from tilewright.gemm.cutedsl.types import named
from tilewright.gemm.problem import GemmProblem, definition
from tilewright.gemm.provider import Argument, Kernel
from tilewright.gemm.roofline import LAUNCH, bandwidth, buffer_bytes, flops
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr
from tilewright.ir.program import View
from tilewright.ir.show import number
from tilewright.runtime import store
from tilewright.target import Target

PACKAGE = "quack-kernels"
VERSIONS = ">=0.6.5,<0.7"
OPERANDS = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
_OP = {"row": "RowVecLoad", "col": "ColVecLoad", "tile": "TileLoad"}
GENERATIONS = {"sm_90": 9, "sm_100": 10}  # as the library counts them
SMALLEST = 16  # of m, n and k that a tile is worth its while for


@dataclass(frozen=True)
class Config:
    """A tile of the result, how many blocks share what they load, and how warps take turns: two
    groups on one tile (cooperative), or each on its own (ping-pong)."""

    m: int
    n: int
    cluster_m: int = 2
    cluster_n: int = 1
    pingpong: bool = False

    @property
    def described(self) -> dict[str, object]:
        return {"TILE_M": self.m, "TILE_N": self.n, "CLUSTER_M": self.cluster_m,
                "CLUSTER_N": self.cluster_n, "PINGPONG": self.pingpong}  # fmt: skip


# The tiles that fit registers and shared memory with at least three stages: wide ones for large
# products, small ones where a wave of large ones would leave most of the card idle.
CONFIGS: tuple[Config, ...] = tuple(
    Config(m, n, *cluster, pingpong)
    for m, n, pingpong in (
        (128, 256, False), (256, 128, False), (256, 192, False), (128, 192, True),
        (128, 128, True), (192, 128, True), (128, 160, True), (128, 208, True), (128, 128, False),
        (64, 256, True), (64, 128, True), (128, 64, True), (64, 64, True),
    )
    for cluster in ((2, 1), (1, 2), (1, 1))
)  # fmt: skip


# Blackwell's tensor cores keep sums in memory of their own; two blocks can share one tile.
BLACKWELL: tuple[Config, ...] = (
    Config(256, 256, 2, 1), Config(256, 128, 2, 1), Config(128, 256, 1, 1), Config(128, 128, 1, 1),
    Config(256, 192, 2, 1), Config(128, 64, 1, 1),
)  # fmt: skip


def configurations(target: Target) -> tuple[Config, ...]:
    return CONFIGS if target.arch == "sm_90" else BLACKWELL


@functools.cache
def version() -> str:
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return ""


def why_not() -> str:
    found = version()
    if not found:
        return f"quack is not installed: pip install '{PACKAGE}{VERSIONS}'"
    if not (0, 6, 5) <= tuple(int(x) for x in found.split(".")[:3]) < (0, 7):
        return f"quack {found} is not one we know how to call: pip install '{PACKAGE}{VERSIONS}'"
    return ""


# ---- problems


def limits(problem: GemmProblem) -> str:
    """Why the kernel cannot compute a problem, or an empty string."""
    p = problem
    if p.op == "mm_plus_mm":
        return "it is the sum of two products"
    reason = of_operands(p)
    if reason:
        return reason
    found = translated(p)
    if isinstance(found, str):
        return found
    tiles = [b.view for b in (*found.operands, *found.results) if b.kind == "tile"]
    if any(ix.ONE not in v.stride[-2:] for v in tiles):
        return "a tile is contiguous in neither direction"
    return of_memory(p, found)


def of_operands(p: GemmProblem) -> str:
    """Why the tensor cores do not get what they multiply, or an empty string."""
    if p.target.arch not in GENERATIONS:
        return "the kernels are Hopper's and Blackwell's"
    dtypes = {o.dtype for o in p.operands}
    if (len(dtypes) > 1 and any(d.itemsize > 1 for d in dtypes)) or not dtypes <= set(OPERANDS):
        return f"no tensor core multiplies {' and '.join(sorted(map(str, dtypes)))}"
    if not all(o.is_plain for o in p.operands):
        return "an operand is computed where it is read, and the card fetches it by itself"
    if any(ix.likely(n) < SMALLEST for n in p.sizes[1:]):
        return f"a side of less than {SMALLEST} is no tile"
    for k, o in enumerate(p.operands):
        if ix.ONE not in o.view.stride[-2:]:
            return "an operand is contiguous in neither direction"
        inner = o.view.stride[-1] if k % 2 == 0 else o.view.stride[-2]
        if o.dtype.itemsize == 1 and inner is not ix.ONE:
            return "operands of eight bits have to be contiguous along k"
        if p.is_batched and o.view.stride[0] is ix.ZERO:
            return "an operand is the same for the whole batch"
    return ""


def of_memory(p: GemmProblem, found: Epilogue) -> str:
    """Why tiles cannot lie where they are, or an empty string."""
    if {v.buffer for v in (b.view for b in found.results)} & set(_read(p, found)):
        return "it overwrites what it reads"
    return "" if multiples(p, found) is not None else "rows do not start at multiples of 16 bytes"


def _read(p: GemmProblem, found: Epilogue) -> list[str]:
    return [*(o.view.buffer for o in p.operands), *(b.view.buffer for b in found.operands)]


def multiples(p: GemmProblem, found: Epilogue) -> dict[str, int] | None:
    """Symbols that have to be multiples of a number when the kernel is called; None where strides
    are not, or cannot be told to be, multiples of 16 bytes."""
    made: dict[str, int] = {}
    tiles = [b.view for b in (*found.operands, *found.results) if b.kind == "tile"]
    wanted = steps([*(o.view for o in p.operands), *tiles])
    for e, whole in sorted(wanted, key=lambda step: len(_factors(step[0]))):
        if ix.mod(e, whole) is ix.ZERO:
            continue
        known = [f.arg for f in _factors(e) if f.op == "const"]
        rest = whole // math.gcd(whole, math.prod(known))
        sizes = [f for f in _factors(e) if f.op == "sym" and ix.likely(f) % rest == 0]
        if not sizes:
            return None
        if not any(made.get(f.arg.name, 1) % rest == 0 for f in sizes):
            made[sizes[0].arg.name] = max(rest, made.get(sizes[0].arg.name, 1))
    return made


def _factors(e: Expr) -> list[Expr]:
    """Of a product of numbers: how far apart the matrices of a batch are."""
    return [f for s in e.src for f in _factors(s)] if e.op == "imul" else [e]


# ---- text


def request(problem: GemmProblem, config: Config) -> tuple[Request, tuple[Argument, ...]]:
    """The module that calls the kernel, and what it is called with."""
    found = translated(problem)
    assert isinstance(found, Epilogue), found
    return Text(problem, config, found).request()


class Text:
    """The parts of that module."""

    paired = False  # whether the kernel gives the function two neighbours of a row as one element

    def __init__(self, problem: GemmProblem, config: Config, epilogue: Epilogue) -> None:
        self.problem, self.config, self.epilogue = problem, config, epilogue
        views = [*(o.view for o in problem.operands), *(b.view for b in epilogue.operands),
                 *(b.view for b in epilogue.results)]  # fmt: skip
        self.buffers = list(dict.fromkeys(v.buffer for v in views))
        self.symbols = [s.arg.name for s in problem.symbols]
        self.multiples = multiples(problem, epilogue) or {}

    def request(self) -> tuple[Request, tuple[Argument, ...]]:
        parts = (self.head(), self.function(), self.kernel(), self.flat())
        text = "\n\n".join((IMPORTS, *("\n".join(lines) for lines in parts))) + "\n"
        params = self.params()
        made = Request(text, "product", tuple(kind for _, kind in params),
                       toolchain.architecture(self.problem.target))  # fmt: skip
        return made, tuple(argument for argument, _ in params)

    def params(self) -> list[tuple[Argument, Kind]]:
        p = self.problem
        found: list[tuple[Argument, Kind]] = [
            (("ptr", b), Pointer(p.memory[b].dtype)) for b in self.buffers]  # fmt: skip
        return found + [(("int", s), Number()) for s in self.symbols]

    @property
    def generation(self) -> int:
        return GENERATIONS[self.problem.target.arch]

    @property
    def in_lanes(self) -> bool:
        """Whether the kernel calls the function for two elements at once."""
        return self.generation == 10 and not self.paired

    @property
    def aside(self) -> tuple[Beside, ...]:
        """Results that are not the kernel's own."""
        return self.epilogue.results if self.paired else self.epilogue.results[1:]

    def head(self) -> list[str]:
        lanes = ["from quack.epilogue.math import F2"] if self.in_lanes else []
        return [*lanes, "from quack.epilogue.frontend import EpiMod",
                "from quack.epilogue.ops import ColVecLoad, RowVecLoad, Scalar, TileLoad",
                "from quack.rounding import RoundingMode",
                "from quack.tile_scheduler import TileSchedulerOptions"]  # fmt: skip

    def function(self) -> list[str]:
        e = self.epilogue
        names = ", ".join(("acc", *(b.name for b in e.operands)))
        keys = ("D", *(b.name for b in self.aside))
        made = ", ".join(f'"{k}": {v}' for k, v in zip(keys, e.values, strict=True))
        if not self.in_lanes:
            return [f"def epilogue({names}):", *(f"    {line}" for line in e.lines),
                    f"    return {{{made}}}"]  # fmt: skip
        return [f"def element({names}):", *(f"    {line}" for line in e.lines),
                f"    return {{{made}}}", "",
                "def half(x, which):",
                "    return getattr(x, which) if isinstance(x, F2) else x", "",
                f"def epilogue({names}):",
                *(f"    {way} = element(*(half(x, {way!r}) for x in ({names},)))"
                  for way in ("lo", "hi")),
                "    return {name: F2(lo[name], hi[name]) for name in lo}"]  # fmt: skip

    def kernel(self) -> list[str]:
        beside = self.epilogue.operands
        ops = ", ".join(f'"{b.name}": {_op(b)}' for b in beside)
        kinds = "".join(f'("{b.name}", "{b.kind}"), ' for b in beside)
        return self.minted(ops, kinds)

    def minted(self, ops: str, kinds: str, manner: str = "") -> list[str]:
        """The class of kernels with that function. Nothing is packed or rounded at random, and
        results are not added to what is there."""
        outputs = "".join(f'"{b.name}", ' for b in self.aside)
        return [
            f"MOD = EpiMod(epilogue, outputs=({outputs}), ops={{{ops}}}{manner})",
            f"GENERATION, PAIRED = {self.generation}, {self.paired}",
            f"KINDS = ({kinds})",
            "KERNEL = MOD._mint(KINDS, GENERATION, PAIRED, False, (), RoundingMode.RN, (), False)",
        ]

    def flat(self) -> list[str]:
        p, c, e = self.problem, self.config, self.epilogue
        params = ", ".join((*(f"p_{b}: cute.Pointer" for b in self.buffers),
                            *(f"{s}: cutlass.Int32" for s in self.symbols),
                            "stream: cuda.CUstream"))  # fmt: skip
        extra = ", ".join((*(f"{b.name}=t_{b.name}" for b in (*e.operands, *self.aside)),
                           *self.given))  # fmt: skip
        clusters = max(1, p.target.sms // (c.cluster_m * c.cluster_n))
        dtype = named(p.operands[0].dtype)
        manner = f", pingpong={c.pingpong}" if self.generation == 9 else ""
        own = "None" if self.paired else f"t_{e.results[0].name}"
        return [
            "@cute.jit",
            f"def product({params}):",
            f"    t_a = {self.tensor(p.operands[0].view)}",
            *(f"    {line}" for line in self.right()),
            *(f"    t_{b.name} = {self.beside(b)}" for b in (*e.operands, *e.results)),
            f"    tile, cluster = ({c.m}, {c.n}), ({c.cluster_m}, {c.cluster_n}, 1)",
            f"    gemm = KERNEL(cutlass.Float32, {dtype}, tile, cluster{manner})",
            f"    schedule = TileSchedulerOptions(cutlass.Int32({clusters}))",
            f"    extra = KERNEL.EpilogueArguments({extra})",
            f"    gemm(t_a, t_b, {own}, None, extra, schedule, None, stream)",
        ]  # fmt: skip

    @property
    def given(self) -> tuple[str, ...]:
        """What else the function is called with, by name."""
        return ()

    def right(self) -> list[str]:
        """The right operand, as n by k."""
        return [f"t_b = {self.tensor(turned(self.problem.operands[1].view))}"]

    def tensor(self, view: View) -> str:
        """A window whose strides are known to be multiples of 16 bytes, or are looked at before a
        launch."""
        size = "".join(f"{number(e)}, " for e in view.size)
        stride = "".join(f"{self.step(e, view.dtype)}, " for e in view.stride)
        return f"cute.make_tensor({start(view)}, cute.make_layout(({size}), stride=({stride})))"

    def step(self, e: Expr, dtype: torch.dtype) -> str:
        if ix.value_of(e) is not None:
            return number(e)
        return f"cute.assume(cutlass.Int64({number(e)}), divby={16 // dtype.itemsize})"

    def beside(self, b: Beside) -> str:
        """A tile as it is; of a row or column, one for each of the batch; where a number is."""
        view = b.view
        if b.kind == "tile":
            return self.tensor(view)
        batch, step = (view.size[0], view.stride[0]) if len(view.size) == 3 else (ix.ONE, ix.ZERO)
        if b.kind == "scalar":
            return start(view)  # the library loads what a pointer points to
        side = -1 if b.kind == "row" else -2
        return self.tensor(View(view.buffer, (batch, view.size[side]), (step, view.stride[side]),
                                view.offset, view.dtype))  # fmt: skip


def _op(b: Beside) -> str:
    """What of the library loads it: a number is loaded in its own type."""
    if b.kind == "scalar":
        return f'Scalar("{b.name}", dtype={named(b.view.dtype)})'
    return f'{_OP[b.kind]}("{b.name}")'


def start(view: View) -> str:
    """The address of its first element."""
    known = f"p_{view.buffer}"
    return known if view.offset is ix.ZERO else f"{known} + {number(view.offset)}"


def turned(view: View) -> View:
    """The right operand as n by k."""
    size, stride = list(view.size), list(view.stride)
    size[-2:], stride[-2:] = reversed(size[-2:]), reversed(stride[-2:])
    return View(view.buffer, tuple(size), tuple(stride), view.offset, view.dtype)


# ---- candidates


def shape(problem: GemmProblem) -> tuple[int, int, int, int]:
    """Likely sizes of what the kernel multiplies: a pair of products has twice the columns."""
    batch, m, n, k = problem.hints
    return batch, m, n * (len(problem.operands) // 2), k


def estimate(problem: GemmProblem, config: Config) -> float:
    """Microseconds: whole waves of tiles on the tensor cores, or the bytes."""
    batch, m, n, k = shape(problem)
    target = problem.target
    tiles = batch * math.ceil(m / (config.m * config.cluster_m)) * config.cluster_m * math.ceil(
        n / (config.n * config.cluster_n)) * config.cluster_n  # fmt: skip
    # A tile's warps load as many bytes as its sides and compute as much as its area: small ones
    # wait. Ping-pong hides the epilogue of one tile behind the other's product.
    side = config.m * config.n / (config.m + config.n)
    busy = side / (side + 8) * (1.0 if config.pingpong else k / (k + 128))
    waves = math.ceil(tiles / target.sms)
    work = 2 * config.m * config.n * k / (flops(target, problem.operands[0].dtype) / target.sms)
    names = dict.fromkeys((*problem.reads, *problem.writes))
    moved = sum(buffer_bytes(problem.memory[b]) for b in names) / bandwidth(target)
    return max(waves * work / busy, moved) + LAUNCH


def fits(problem: GemmProblem, config: Config) -> bool:
    """Tiles that reach far beyond the result are not tried, nor those whose neighbours have
    nothing to share; two results of a tile must fit beside its operands."""
    _, m, n, _ = shape(problem)
    if config.m >= 2 * max(m, 64) or config.n >= 2 * max(n, 64):
        return False
    if config.cluster_m > math.ceil(m / config.m) or config.cluster_n > math.ceil(n / config.n):
        return False
    several = len(problem.writes) > 1 or len(problem.reads) > 3
    return not (several and config.m * config.n > 128 * 256)


@dataclass(frozen=True)
class QuackCandidate:
    problem: GemmProblem
    config: Config
    name: str
    estimate: float
    provider: str = "CUTEDSL"

    @property
    def description(self) -> str:
        return ", ".join(f"{k}={v}" for k, v in sorted(self.config.described.items()))

    @property
    def key(self) -> str:
        return store.key("quack", version(), self._request[0].key)

    @functools.cached_property
    def _request(self) -> tuple[Request, tuple[Argument, ...]]:
        return self.requested()

    def requested(self) -> tuple[Request, tuple[Argument, ...]]:
        return request(self.problem, self.config)

    @property
    def near(self) -> tuple[str, str] | None:
        """Buffers that one descriptor has to reach both of."""
        return None

    def kernel(self) -> Kernel:
        p = self.problem
        made, arguments = self._request
        names = [name for _, name in arguments]
        found = translated(p)
        assert isinstance(found, Epilogue)
        guards = tuple((names.index(s), n) for s, n in (multiples(p, found) or {}).items())
        otherwise = Resort.of(p, definition(p)).over(names)
        device = p.memory[p.writes[0]].device.index or 0
        near = None if self.near is None else (names.index(self.near[0]), names.index(self.near[1]))
        source = CuteSource(self.name, made, device, otherwise, guards, near=near)
        fused = "_fused" if p.epilogue else ""
        return Kernel(f"cutedsl_quack{fused}_{p.op}", source, arguments)


def candidates(problem: GemmProblem) -> Sequence[QuackCandidate]:
    """Best first by the model."""
    every = timed(problem, configurations(problem.target))
    return [QuackCandidate(problem, c, f"cutedsl_quack_{rank}", time)
            for rank, (time, c) in enumerate(every)]  # fmt: skip


def timed(problem: GemmProblem, every: Sequence[Config]) -> list[tuple[float, Config]]:
    """Those that fit, with how long they take by the model, the fastest first."""
    found = sorted((estimate(problem, c), k) for k, c in enumerate(every) if fits(problem, c))
    return [(time, every[k]) for time, k in found]
