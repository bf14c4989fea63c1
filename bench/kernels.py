"""Generated Triton kernels alone on a card: device time, and the share of the copy bandwidth.

`python -m bench.kernels [names] [--configs] [--reference]`: bytes are the fewest the program can
move (arguments read once, results written once). `--configs` times every configuration of each
kernel, `--reference` also eager and torch's own compiler.
"""

from __future__ import annotations

import argparse
import functools
import linecache
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from tilewright.codegen.triton.generate import generate, limits
from tilewright.codegen.triton.launch import TritonKernel
from tilewright.codegen.triton.plan.config import Config
from tilewright.graph import decompositions
from tilewright.graph.simplify import simplify
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr
from tilewright.ir.program import View
from tilewright.lower.graph import lower
from tilewright.schedule.plan import schedule
from tilewright.target import Target

Maker = Callable[[], tuple[Callable[..., Any], list[Tensor]]]
PROGRAMS: dict[str, Maker] = {}


def _bf16(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _rms(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16() * w


def _rope(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    a, b = x[..., :64], x[..., 64:]
    return torch.cat((a * c - b * s, b * c + a * s), -1)


def _declare() -> None:
    """The programs, as one table."""
    x = functools.partial(_bf16, 8192, 8192)
    table: dict[str, Maker] = {
        "add_one": lambda: (lambda a: a + 1, [x()]),
        "gelu": lambda: (lambda a: F.gelu(a) * 2 + 1, [x()]),
        "gelu_tanh": lambda: (lambda a, b: F.gelu(a * 1.1 + b, approximate="tanh") * b, [x(), x()]),
        "bias_relu": lambda: (lambda a, b: torch.relu(a + b), [x(), _bf16(8192)]),
        "swiglu": lambda: (lambda a: F.silu(a[:, :8192]) * a[:, 8192:], [_bf16(8192, 16384)]),
        "softmax": lambda: (lambda a: torch.softmax(a, -1), [x()]),
        "softmax_f32": lambda: (lambda a: torch.softmax(a, -1), [x().float()]),
        "softmax_1000": lambda: (lambda a: torch.softmax(a, -1), [_bf16(65536, 1000)]),
        "layernorm": lambda: (lambda a, w, b: F.layer_norm(a, (4096,), w, b),
                              [_bf16(16384, 4096), _bf16(4096), _bf16(4096)]),
        "add_layernorm": lambda: (lambda a, r, w, b: (a + r, F.layer_norm(a + r, (4096,), w, b)),
                                  [_bf16(16384, 4096), _bf16(16384, 4096), _bf16(4096),
                                   _bf16(4096)]),
        "rmsnorm": lambda: (_rms, [_bf16(16384, 4096), _bf16(4096)]),
        "rmsnorm_768": lambda: (_rms, [_bf16(65536, 768), _bf16(768)]),
        "cross_entropy": lambda: (lambda a, t: F.cross_entropy(a, t, reduction="none"),
                                  [_bf16(8192, 128256),
                                   torch.randint(0, 128256, (8192,), device="cuda")]),
        "transpose": lambda: (lambda a: a.t().contiguous(), [x()]),
        "transpose_f32": lambda: (lambda a: a.t().contiguous(), [x().float()]),
        "permute": lambda: (lambda a: a.permute(0, 2, 1, 3).contiguous(),
                            [_bf16(16, 2048, 32, 128)]),
        "channels_last": lambda: (lambda a: a.permute(0, 2, 3, 1).contiguous(),
                                  [_bf16(64, 256, 56, 56)]),
        "rope": lambda: (_rope, [_bf16(4, 32, 4096, 128), _bf16(4096, 64), _bf16(4096, 64)]),
        "row_sum": lambda: (lambda a: a.sum(-1), [_bf16(16384, 8192)]),
        "long_row_sum": lambda: (lambda a: a.sum(-1), [_bf16(1024, 131072)]),
        "variance": lambda: (lambda a: a.var(-1), [_bf16(16384, 8192)]),
        "argmax": lambda: (lambda a: a.argmax(-1), [_bf16(8192, 32768)]),
        "column_sum": lambda: (lambda a: a.sum(0), [_bf16(8192, 16384)]),
        "narrow_column_sum": lambda: (lambda a: a.sum(0), [_bf16(65536, 1024)]),
        "full_sum": lambda: (lambda a: a.sum(), [_bf16(16384, 8192)]),
        "batch_norm_stats": lambda: (lambda a: torch.var_mean(a, (0, 2, 3)),
                                     [_bf16(64, 256, 56, 56)]),
        "cumsum": lambda: (lambda a: a.cumsum(-1), [_bf16(16384, 4096)]),
    }  # fmt: skip
    PROGRAMS.update(table)


# ---- running kernels without the rest of the runtime


@dataclass
class Launch:
    kernel: TritonKernel
    function: Any
    args: list[Any]

    def __call__(self, config: Config | None = None) -> None:
        chosen = config or self.kernel.config
        self.function[(self.kernel.programs({}, chosen),)](
            *self.args, **chosen.kwargs, num_warps=chosen.num_warps, num_stages=chosen.num_stages
        )


def _number(e: Expr) -> int:
    value = ix.value_of(e)
    assert value is not None
    return value


def _load(kernel: TritonKernel) -> Any:
    file = f"<{kernel.name} {hash(kernel.text)}>"
    linecache.cache[file] = (len(kernel.text), None, kernel.text.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"__name__": file}
    exec(compile(kernel.text, file, "exec"), namespace)
    return namespace[kernel.name]


def prepare(fn: Callable[..., Any], args: list[Tensor]) -> tuple[list[Launch], list[Tensor]]:
    """The launches of a program, and the tensors that will hold its results."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        fake = [torch.empty_strided(a.shape, a.stride(), dtype=a.dtype) for a in args]
        gm = make_fx(lambda *xs: pytree.tree_leaves(fn(*xs)),
                     decomposition_table=decompositions.table())(*fake)  # fmt: skip
    simplify(gm)
    lowered = lower(gm)
    flag = torch.zeros(1, dtype=torch.int64, device="cuda")
    tensors = dict(zip(lowered.inputs, args, strict=True))
    launches: list[Launch] = []
    card = Target.of("cuda")
    plan = schedule(lowered, lambda program, group: limits(program, group, card))
    lowered = plan.program
    for k, step in enumerate(plan.steps):
        assert step.group.call is None, f"{step.group.call} is not a kernel of ours"
        kernel = generate(lowered, step.group, card, str(k))
        for name in sorted(step.group.writes - step.group.local - tensors.keys()):
            b = lowered.buffers[name]
            tensors[name] = torch.empty_strided([_number(s) for s in b.size],
                                                [_number(s) for s in b.stride],
                                                dtype=b.dtype, device="cuda")  # fmt: skip
        given = [tensors[p.name] for p in kernel.params]
        given += [flag] if kernel.checked else []
        launches.append(Launch(kernel, _load(kernel), given))
    views = [o for o in lowered.outputs if isinstance(o, View)]
    return launches, [tensors[v.buffer].as_strided([_number(s) for s in v.size],
                                                   [_number(s) for s in v.stride],
                                                   _number(v.offset)) for v in views]  # fmt: skip


def timed(fn: Callable[[], Any], repeat: int = 20) -> float:
    """Microseconds of device time: a CUDA graph of many runs, the best of five replays."""
    fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeat):
            fn()
    times: list[float] = []
    for _ in range(6):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / repeat * 1e3)
    return min(times)


def copy_bandwidth() -> float:
    """Bytes per microsecond, read and written, of the plainest kernel there is."""
    a = torch.empty(1 << 29, dtype=torch.bfloat16, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.nbytes / timed(lambda: torch.neg(a, out=b), 5)


def measure(name: str, bandwidth: float, every: bool, reference: bool) -> None:
    fn, args = PROGRAMS[name]()
    launches, results = prepare(fn, args)
    us = timed(lambda: [launch() for launch in launches])
    with torch.no_grad():
        wanted = pytree.tree_leaves(fn(*args))
    right = all(
        torch.allclose(a.float(), w.float(), rtol=2e-2, atol=1e-2 * float(w.abs().max()))
        for a, w in zip(results, wanted, strict=True)
    )
    least = sum(t.nbytes for t in (*args, *results))
    kinds = " ".join(f"{'_'.join(k.kernel.name.split('_')[1:2])}{dict(k.kernel.config.blocks)}"
                     f"w{k.kernel.config.num_warps}" for k in launches)  # fmt: skip
    print(f"{name:18} {us:8.1f} us  {least / us / bandwidth:6.1%} of copy  "
          f"{'' if right else 'WRONG '}{kinds}", flush=True)  # fmt: skip
    if every:
        for launch in launches:
            for config in launch.kernel.configs:
                found = timed(functools.partial(launch, config))
                print(f"    {launch.kernel.name} {dict(config.blocks)} {config.num_warps} warps: "
                      f"{found:8.1f} us", flush=True)  # fmt: skip
    if reference:
        torch._dynamo.reset()
        compiled = torch.compile(fn)
        with torch.no_grad():
            theirs, eager = timed(lambda: compiled(*args)), timed(lambda: fn(*args))
        print(f"    eager {eager:.1f} us, reference {theirs:.1f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.kernels")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--configs", action="store_true")
    parser.add_argument("--reference", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    _declare()
    bandwidth = copy_bandwidth()
    print(f"copy: {bandwidth / 1e6:.2f} TB/s")
    for name in options.names or PROGRAMS:
        torch.cuda.empty_cache()
        try:
            measure(name, bandwidth, options.configs, options.reference)
        except Exception as why:  # the others are still worth their numbers
            print(f"{name:18} FAILED: {type(why).__name__}: {str(why)[:300]}", flush=True)


if __name__ == "__main__":
    main()
