"""`TritonTemplate`: a kernel of products as Triton text with hooks, rendered for a problem.

The text is Jinja. It has these names: the sizes of the problem's blocks and other constants are
`tl.constexpr` parameters of the kernel (`BLOCK_M`, `GROUP_M`, ...); `batched`, `split`, `rows`,
`stages` and `tma` tell variants apart; and hooks write what depends on the problem, each alone on
its line:

    {{ head() }}         imports, decorator and signature
    {{ size("m") }}      a size: `batch`, `m`, `n` or `k`
    {{ tile() }}         `m`, `n` and their masks, of the block at (`pid_m`, `pid_n`)
    {{ begin("a") }}     what the loads of an operand need before the loop over k
    {{ load("a") }}      the operand's tile `a` at the block of k that starts at `k0`
    {{ sinks() }}        what the stores need before the first tile
    {{ dot("acc", "a", "b") }}  the tiles are multiplied and added up, with scales of blocks of k
    {{ store("acc") }}   scaling, bias, rounding, epilogue and stores
    {{ gather("acc") }}  a share of the sum leaves (see `mm.jinja`); `total` brings all together

A template registers itself under its name. Users make their own with the same class.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import jinja2

from tilewright import caches, metrics
from tilewright import config as options
from tilewright.codegen.triton.tile.ops import TYPE
from tilewright.codegen.triton.tile.render import imports
from tilewright.errors import TilewrightError
from tilewright.gemm import descriptors
from tilewright.gemm.heuristics import GemmConfig, available_sms, power
from tilewright.gemm.hooks import (
    COUNTERS,
    DESCRIPTORS,
    WORKSPACE,
    Hooks,
    Shape,
    accumulator,
    allow_tf32,
    limits,
    scaled_limits,
)
from tilewright.gemm.problem import GemmProblem, Op
from tilewright.gemm.provider import Argument
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr
from tilewright.ir.show import number
from tilewright.runtime import store
from tilewright.target import Target

KERNELS = Path(__file__).parent / "kernels"
MOST_ROWS = 8  # of a product done without the matrix unit


@dataclass(frozen=True)
class Rendered:
    """A kernel's text, what it is launched with, and on how many programs (as Python text)."""

    text: str
    name: str
    params: tuple[tuple[Argument, str, str], ...]  # argument, name in the text, Triton type
    programs: str
    checked: bool
    is_wide: bool
    assume: tuple[Expr, ...]
    workspace: Expr  # float32 elements
    counters: Expr  # int32 elements, zero before and after


class TritonTemplate:
    """`ops` are those of problems it can compute. `persistent`: as many programs as SMs; `split`:
    the loop over k may be shared out; `rows`: the left operand is walked row by row, no dot; `tma`:
    operands are fetched by the card through tensor descriptors; `specialised`: by warps that do
    nothing else, and results are stored in pieces."""

    all_templates: ClassVar[dict[str, TritonTemplate]] = {}
    test_cache: ClassVar[bool] = False  # for tests: render again what is found, and compare

    def __init__(self, name: str, source: str, ops: Sequence[Op] = ("mm", "addmm"),
                 persistent: bool = False, split: bool = False, rows: bool = False,
                 tma: bool = False, specialised: bool = False) -> None:  # fmt: skip
        self.name = name
        self.source = source
        self.ops = tuple(ops)
        self.persistent, self.split, self.rows, self.tma = persistent, split, rows, tma
        self.specialised = specialised
        self._template = _environment().from_string(source)
        self.all_templates[name] = self

    @property
    def uid(self) -> str:
        """What heuristics are registered under."""
        return f"triton::{self.name}"

    @functools.cached_property
    def digest(self) -> str:
        kind = f"{self.persistent} {self.split} {self.rows} {self.tma} {self.specialised}"
        return store.key("template", self.name, self.source, kind)

    def limits(self, problem: GemmProblem) -> str:
        """Why it cannot compute a problem, or an empty string."""
        if problem.op not in self.ops:
            return f"the template {self.name} does not compute {problem.op}"
        rows = ix.value_of(problem.m.src[0])
        if self.rows and (rows is None or rows > MOST_ROWS):
            return "too many rows to do without the matrix unit"
        if self.rows and problem.op == "mm_plus_mm":
            return "one product at a time"
        reason = scaled_limits(problem) if problem.op == "_scaled_mm" else ""
        reason = reason or limits(problem) or (descriptors.limits(problem) if self.tma else "")
        if reason or not (self.tma and self.persistent):
            return reason
        if self.specialised != is_specialised(problem.target):
            return ("its warps are not specialised on this card" if self.specialised
                    else "a template with specialised warps is in its place")  # fmt: skip
        return ""

    def constants(self, problem: GemmProblem, config: GemmConfig) -> dict[str, int]:
        """The kernel's `tl.constexpr` parameters."""
        found = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k}
        found |= {} if self.rows else {"GROUP_M": config.group_m}
        found |= {"SPLIT_K": config.split_k} if config.split_k > 1 else {}
        found |= {"NUM_SMS": available_sms(problem.target)} if self.persistent else {}
        if self.specialised:
            # of fewer warps or stages nothing can be set apart
            apart = config.num_warps >= 4 and config.num_stages >= 2
            found |= {"EPILOGUE_SUBTILE": config.epilogue_subtile, "WARP_SPECIALIZE": apart,
                      "FLATTEN": apart}  # fmt: skip
        return found

    def facts(self, problem: GemmProblem, config: GemmConfig) -> dict[str, object]:
        """All that tells two of its kernels for a problem apart: what descriptions show."""
        k = ix.value_of(problem.k.src[0])
        found: dict[str, object] = dict(self.constants(problem, config))
        found["ACC_TYPE"] = TYPE[accumulator(problem)]
        found["ALLOW_TF32"] = allow_tf32(problem)
        if problem.op == "_scaled_mm":
            found["USE_FAST_ACCUM"] = problem.fast
        found["EVEN_K"] = k is not None and k % config.block_k == 0
        return found

    def programs(self, problem: GemmProblem, config: GemmConfig) -> str:
        """How many programs run, as Python text in the names of the problem's symbols."""
        tiles = number(tiles_of(problem, config))
        return f"min({available_sms(problem.target)}, {tiles})" if self.persistent else (
            tiles if config.split_k == 1 else f"({tiles}) * {config.split_k}")  # fmt: skip

    def render(self, problem: GemmProblem, config: GemmConfig, name: str, wide: bool = False
               ) -> Rendered:  # fmt: skip
        """The kernel; the same request is rendered once in a process."""
        key = self.key(problem, config, name, wide)
        found = _generated.get(key) if options.enable_caching_generated_triton_templates else None
        counter = metrics.counters["inductor"]
        counter[f"generated_module_cache_{'miss' if found is None else 'hit'}"] += 1
        if found is None:
            found = _generated[key] = self._render(problem, config, name, wide)
        elif self.test_cache and found != self._render(problem, config, name, wide):
            raise TilewrightError(
                f"Generated code cache results in wrong output: {self.name} for {problem}",
                stage="choose",
                hint="two requests that render differently have one key (TritonTemplate.key)",
            )
        return found

    def key(self, problem: GemmProblem, config: GemmConfig, name: str, wide: bool = False) -> str:
        """Of all that a rendering depends on."""
        return store.key(self.digest, problem.key, repr(config), name, str(wide),
                         str(allow_tf32(problem)), repr(options.code_key()))  # fmt: skip

    def _render(self, problem: GemmProblem, config: GemmConfig, name: str, wide: bool
                ) -> Rendered:  # fmt: skip
        blocks = config.block_m, config.block_n, config.block_k
        described = self.tma and options.triton.enable_template_tma_store
        split = self.split and config.split_k > 1
        hooks = Hooks(problem, Shape(*blocks, wide, self.tma, self.rows, described,
                                     config.epilogue_subtile, split))  # fmt: skip
        text = _Text(hooks)
        loops = {"batch": problem.batch, "m": problem.m, "n": problem.n, "k": problem.k}
        made = self._template.render(
            head=text.head,
            size=lambda of: hooks.size(loops[of]),
            tile=lambda: text.lines(hooks.tile()),
            begin=lambda of, row=None: text.lines(hooks.operand(of, row).before),
            load=lambda of, row=None: text.lines(hooks.operand(of, row).inside),
            sinks=lambda: text.lines(hooks.sinks()),
            dot=lambda of, a, b: text.lines(hooks.dot(of, a, b)),
            store=lambda of: text.lines(hooks.store(of)),
            gather=lambda of: text.lines(hooks.gather(of)),
            total=lambda of: text.lines(hooks.total(of)),
            end=hooks.end,
            along_k=hooks.grouped is problem.k,
            acc_type=TYPE[accumulator(problem)],
            whole=not accumulator(problem).is_floating_point,
            wide=".to(tl.int64)" if hooks.wide else "",
            batched=problem.is_batched,
            split=split,
            tma=self.tma,
            stages=config.num_stages,
            rows=ix.value_of(problem.m.src[0]) if self.rows else 0,
        )
        beside = len(hooks.sums)  # numbers that a row of a share has beside its products
        shares = config.split_k * config.block_m * (config.block_n + beside) if split else 0
        own = config.split_k * DESCRIPTORS if self.tma else 0
        tiles = tiles_of(problem, config)
        return Rendered(
            text.whole(made, name, self.constants(problem, config)),
            name,
            text.params(),
            self.programs(problem, config),
            hooks.checked,
            hooks.wide,
            self._assumed(hooks),
            ix.mul(tiles, shares + own),
            tiles if split else ix.ZERO,
        )

    def _assumed(self, hooks: Hooks) -> tuple[Expr, ...]:
        narrow = () if hooks.wide else tuple(hooks.assume or ())
        more = descriptors.assumed(hooks.problem) if self.tma else ()
        return tuple(dict.fromkeys((*narrow, *more)))


def is_specialised(target: Target) -> bool:
    """Whether persistent loops have warps of their own for loads and stores: on the Blackwell of
    data centres, whose matrix units leave sums in a memory of their own. On Hopper the same text
    compiles, and nobody has measured it."""
    return target.capability[0] == 10


class _Text:
    """Hooks leave a mark on their line, which is replaced by their lines when all is known."""

    def __init__(self, hooks: Hooks) -> None:
        self.hooks = hooks
        self.marked: list[list[str]] = []

    def lines(self, lines: list[str]) -> str:
        self.marked.append(lines)
        return f"@{len(self.marked) - 1}@"

    def head(self) -> str:
        return "@head@"

    def params(self) -> tuple[tuple[Argument, str, str], ...]:
        names = self.hooks.names
        return tuple((argument, name, dtype) for (argument, dtype), name
                     in zip(self.hooks.params, names, strict=True))  # fmt: skip

    def whole(self, made: str, name: str, constants: Mapping[str, int]) -> str:
        lines = [line for raw in made.splitlines() for line in self._filled(raw)]
        names = [n for _, n, _ in self.params()]
        names += ["err"] if self.hooks.checked else []
        names += [f"{c}: tl.constexpr" for c in constants]
        head = [*imports(lines), "", "", "@triton.jit", f"def {name}({', '.join(names)}):"]
        at = lines.index("@head@")
        return "\n".join([*lines[:at], *head, *lines[at + 1 :]]) + "\n"

    def _filled(self, line: str) -> list[str]:
        found = re.fullmatch(r"( *)@(\d+)@", line)
        if found is None:
            return [line]
        return [found[1] + inner for inner in self.marked[int(found[2])]]


def tiles_of(problem: GemmProblem, config: GemmConfig) -> Expr:
    """How many blocks the result has."""
    batch, m, n, _ = problem.sizes
    rows = ix.floordiv(ix.add(m, config.block_m - 1), config.block_m)
    columns = ix.floordiv(ix.add(n, config.block_n - 1), config.block_n)
    return ix.mul(batch, rows, columns) if problem.is_batched else ix.mul(rows, columns)


_generated: dict[str, Rendered] = {}
caches.register(_generated.clear)


@functools.cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=False)


def _file(name: str) -> str:
    return (KERNELS / f"{name}.jinja").read_text()


_TWO: tuple[Op, ...] = ("mm", "addmm", "_scaled_mm")
_PACKED: tuple[Op, ...] = ("_weight_int8pack_mm", "_weight_int4pack_mm")
_BATCHED: tuple[Op, ...] = ("bmm", "baddbmm")
mm_template = TritonTemplate("mm", _file("mm"), (*_TWO, *_PACKED, "_int_mm"))
bmm_template = TritonTemplate("bmm", _file("mm"), _BATCHED)
mm_plus_mm_template = TritonTemplate("mm_plus_mm", _file("mm_plus_mm"), ("mm_plus_mm",))
split_k_template = TritonTemplate("mm_split_k", _file("mm"), (*_TWO, *_PACKED, *_BATCHED),
                                  split=True)  # fmt: skip
mv_template = TritonTemplate("mv", _file("mv"), (*_TWO, *_PACKED, *_BATCHED), rows=True, split=True)
pair_template = TritonTemplate("mm_pair", _file("mm_pair"), ("mm_pair",))
persistent_template = TritonTemplate("mm_persistent", _file("mm_persistent"),
                                     (*_TWO, *_BATCHED, "_int_mm"), persistent=True)  # fmt: skip
tma_template = TritonTemplate("mm_tma", _file("mm"), (*_TWO, *_BATCHED, "_int_mm"), split=True,
                              tma=True)  # fmt: skip
persistent_tma_template = TritonTemplate("mm_persistent_tma", _file("mm_persistent"),
                                         (*_TWO, *_BATCHED, "_int_mm"), persistent=True,
                                         tma=True)  # fmt: skip
specialised_template = TritonTemplate("blackwell_ws_persistent_device_tma", _file("mm_specialised"),
                                      (*_TWO, *_BATCHED), persistent=True, tma=True,
                                      specialised=True)  # fmt: skip


class GroupedTemplate(TritonTemplate):
    """A tile of a group's result per program."""

    def constants(self, problem: GemmProblem, config: GemmConfig) -> dict[str, int]:
        found = super().constants(problem, config)
        count = ix.value_of(problem.sizes[0])
        assert count is not None
        return found | {"GROUPS": power(count)}

    def programs(self, problem: GemmProblem, config: GemmConfig) -> str:
        """Rows of groups end anywhere: each has a tile more than it fills."""
        batch, m, n, _ = problem.sizes
        rows = ix.floordiv(ix.add(m, config.block_m - 1), config.block_m)
        columns = ix.floordiv(ix.add(n, config.block_n - 1), config.block_n)
        along_k = problem.batch in problem.place
        return number(ix.mul(columns, ix.mul(batch, rows) if along_k else ix.add(batch, rows)))


grouped_template = GroupedTemplate("grouped_mm", _file("grouped_mm"), ("_grouped_mm",))

__all__ = ["COUNTERS", "WORKSPACE", "Rendered", "TritonTemplate", "allow_tf32"]
