"""Nothing is compiled twice: not in this process, not in the next."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.value_ranges import ValueRanges

from tilewright import config, metrics
from tilewright.graph.boundary import EVERYTHING
from tilewright.graph.digest import digest, digest_captured
from tilewright.host import artifact
from tilewright.testing import fresh_cache

SCRIPT = """
import json, torch
from tilewright import metrics
from tilewright.runtime import compilers

started = []
run = compilers.run
def spy(command, *args, **kwargs):
    started.append(command)
    return run(command, *args, **kwargs)
compilers.run = spy

def f(x, w):
    return (torch.nn.functional.layer_norm(x, (16,), w) * 2).sum(), x.gelu() if False else x.tanh()

x, w = torch.randn(8, 16, requires_grad=True), torch.randn(16, requires_grad=True)
torch.manual_seed(0)
total, _ = torch.compile(f, backend="tilewright")(x, w)
total.backward()
print(json.dumps({
    "compilers": len([c for c in started if "-x" in c]), "hits": metrics.cache_hits,
    "misses": metrics.cache_misses, "kernels": metrics.generated_kernel_count,
    "bytes": metrics.num_bytes_accessed, "native": metrics.native_nodes,
}))
"""


def run_script() -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_a_second_process_compiles_nothing_and_counts_the_same(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    first, second = run_script(), run_script()
    assert first["misses"] == 2 and first["hits"] == 0 and first["compilers"] > 0
    assert second["misses"] == 0 and second["hits"] == 2 and second["compilers"] == 0
    for name in ("kernels", "bytes", "native"):
        assert first[name] == second[name] > 0


def scaled(x: Tensor) -> Tensor:
    return x.exp() * 3


def compile_again(function: Any, *args: Any, **how: Any) -> tuple[int, int]:
    """(hits, misses) of one compilation from a fresh dynamo."""
    torch._dynamo.reset()
    metrics.reset()
    out = torch.compile(function, backend="tilewright", **how)(*args)
    torch.testing.assert_close(out, function(*args))
    return metrics.cache_hits, metrics.cache_misses


def test_what_matters_to_the_code_is_in_the_key() -> None:
    x = torch.randn(6, 8)
    with fresh_cache():
        assert compile_again(scaled, x) == (0, 1)
        assert compile_again(scaled, x) == (1, 0)
        assert compile_again(scaled, torch.randn(6, 9)) == (0, 1)
        assert compile_again(scaled, x.double()) == (0, 1)
        assert compile_again(scaled, torch.randn(8, 6).t()) == (0, 1)
        assert compile_again(scaled, x, dynamic=True) == (0, 1)
        assert compile_again(lambda t: t.exp() * 4, x) == (0, 1)
        assert compile_again(scaled, x, options={"cpp.simdlen": 1}) == (0, 1)


def test_the_place_in_the_file_is_not_in_the_key() -> None:
    x = torch.randn(6, 8)

    def elsewhere(x: Tensor) -> Tensor:
        return x.exp() * 3

    with fresh_cache():
        assert compile_again(scaled, x) == (0, 1)
        assert compile_again(elsewhere, x) == (1, 0)


def test_an_error_from_a_cached_program_names_the_current_line() -> None:
    def first(x: Tensor, i: Tensor) -> Tensor:
        return x[i] + 1

    def second(x: Tensor, i: Tensor) -> Tensor:
        return x[i] + 1

    x, good, bad = torch.randn(5), torch.tensor([0, 4]), torch.tensor([0, 5])
    with fresh_cache():
        compile_again(first, x, good)
        torch._dynamo.reset()
        metrics.reset()
        call = torch.compile(second, backend="tilewright")
        call(x, good)
        assert metrics.cache_hits == 1
        with pytest.raises(
            IndexError, match=f"test_graph_cache.py:{second.__code__.co_firstlineno + 1}"
        ):
            call(x, bad)


def test_constants_are_told_apart_by_their_values() -> None:
    x = torch.randn(3)
    with fresh_cache():
        assert compile_again(lambda t: t + torch.tensor([1.0, 2.0, 3.0]), x) == (0, 1)
        assert compile_again(lambda t: t + torch.tensor([1.0, 2.0, 4.0]), x) == (0, 1)
        assert compile_again(lambda t: t + torch.tensor([1.0, 2.0, 3.0]), x)[1] == 0


def test_the_cache_can_be_switched_off() -> None:
    x = torch.randn(6, 8)
    with fresh_cache(), config.patch(fx_graph_cache=False):
        assert compile_again(scaled, x) == (0, 1)
        assert compile_again(scaled, x) == (0, 1)


def test_a_damaged_entry_is_compiled_anew() -> None:
    x = torch.randn(6, 8)
    with fresh_cache() as folder:
        assert compile_again(scaled, x) == (0, 1)
        (entry,) = folder.rglob("*.graph")
        entry.write_bytes(b"not a pickle")
        assert compile_again(scaled, x) == (0, 1)
        assert compile_again(scaled, x) == (1, 0)


def test_the_same_graph_in_another_role_is_another_artefact() -> None:
    graph = torch.fx.Graph()
    graph.output(())
    gm = torch.fx.GraphModule({}, graph)
    roles = [replace(EVERYTHING, role=role) for role in ("inference", "backward")]
    assert len({artifact.key(gm, boundary) for boundary in roles}) == 2


# ---- digests


def graph_of(*values: Any, target: Any = torch.ops.aten.add.Tensor, args: tuple[Any, ...] = ()
             ) -> torch.fx.GraphModule:  # fmt: skip
    """Two arguments with these values, and one call of them."""
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(f"a{k}") for k in range(len(values))]
    for node, value in zip(nodes, values, strict=True):
        node.meta["val"] = value
    made = graph.call_function(target, (*nodes, *args))
    made.meta["val"] = values[0]
    graph.output((made,))
    return torch.fx.GraphModule({}, graph)


def test_a_digest_tells_each_part_of_a_value() -> None:
    """Size, strides, where it begins, dtype, what shares memory with what, and conjugation."""
    base = torch.zeros(100)

    def window(size: int = 6, stride: int = 2, start: int = 0, of: Tensor = base) -> Tensor:
        return of.as_strided((size, 3), (stride, 1), start)

    other, number = torch.zeros(100), torch.zeros(6, 3, dtype=torch.complex64)
    pairs = [
        (window(), window()), (window(), window(stride=3)), (window(), window(start=8)),
        (window(), window(of=other)), (window(size=5), window(size=5)),
        (window(of=base.double()), window(of=base.double())),
        (window(of=base.int()), window(of=base.int())), (number, number), (number, number.conj()),
    ]  # fmt: skip
    found = [digest(graph_of(*pair)) for pair in pairs]
    assert len(set(found)) == len(pairs)
    assert digest(graph_of(window(), window())) == found[0]
    assert digest(graph_of(window(of=other), window(of=other))) == found[0], "memory has no name"


def test_a_digest_tells_arguments_apart_as_far_as_they_mean_something() -> None:
    x = torch.zeros(4)
    near = 1.0 + 2**-52
    given = [(1,), (True,), (1.0,), (near,), ("1",), (None,), (slice(0, 8, 2),), (slice(0, 8),),
             ([1, 2],), ([1], 2), (torch.float32,), (torch.float64,), (0.0,), (-0.0,),
             (float("nan"),), (torch.device("cpu"),), (torch.device("cuda", 1),), ({"alpha": 2},),
             ({"beta": 2},)]  # fmt: skip
    found = [digest(graph_of(x, args=args)) for args in given]
    assert len(set(found)) == len(given)
    assert digest(graph_of(x, target=torch.ops.aten.sub.Tensor, args=(1,))) not in found


def test_a_digest_tells_constants_of_the_same_bits() -> None:
    def held(value: Tensor) -> str:
        graph = torch.fx.Graph()
        graph.output((graph.get_attr("c"),))
        root = torch.nn.Module()
        root.register_buffer("c", value)
        return digest(torch.fx.GraphModule(root, graph))

    bits = torch.arange(6, dtype=torch.int32)
    values = [bits, bits.view(torch.float32), bits.view(2, 3), bits.view(2, 3).t().contiguous().t(),
              bits + 1]  # fmt: skip
    assert len({held(v) for v in values}) == len(values)
    assert held(bits.clone()) == held(bits)


def test_a_digest_tells_what_is_known_of_sizes() -> None:
    """The range of a symbol and its likely value shape the code; its name in this process is the
    same in the next."""

    def traced(low: int, high: int, hint: int) -> str:
        env = ShapeEnv()
        symbol = env.create_symbol(hint, ConstantSource("n"), DimDynamic.DYNAMIC)
        env.var_to_range[symbol] = ValueRanges(low, high)
        n = env.create_symintnode(symbol, hint=hint)
        return digest(graph_of(n, n))

    first = traced(2, 64, 8)
    assert traced(2, 64, 8) == first
    assert len({first, traced(2, 128, 8), traced(4, 64, 8), traced(2, 64, 9)}) == 4


def test_a_digest_of_what_dynamo_gives_tells_who_wants_gradients() -> None:
    graph = torch.fx.Graph()
    graph.output((graph.placeholder("x"),))
    gm = torch.fx.GraphModule({}, graph)
    plain, leaf = torch.zeros(3), torch.zeros(3, requires_grad=True)
    given = [plain, leaf, leaf * 2, torch.nn.Parameter(plain)]
    with torch.inference_mode():
        given.append(torch.zeros(3))
    assert len({digest_captured(gm, [x]) for x in given}) == len(given)
