"""CuTe DSL templates as text: hooks, entries, choices, the vocabulary. Nothing is compiled."""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Any

import pytest
import torch

from tests.cutedsl import KINDS, evaluate, of
from tilewright.gemm.cutedsl import (
    CuteDSLOpOverrides,
    CuteDSLTemplate,
    CuteDSLTemplateKernel,
    Layout,
    PartialRender,
    Subgraph,
    entry,
    template,
    vocabulary,
)
from tilewright.gemm.cutedsl.kernel import Fused, placeholder
from tilewright.gemm.cutedsl.overrides import CSEVariable
from tilewright.gemm.cutedsl.writer import CSE, Writer
from tilewright.ir import build
from tilewright.ir import index as ix
from tilewright.ir.expr import const, load, make, sym, var
from tilewright.ir.ops import TABLE
from tilewright.ir.program import Buffer, Store, View

SIMPLE = """
{{gen_defines()}}
@cute.kernel
def {{kernel_name}}_kernel(x: cute.Tensor, y: cute.Tensor, out: cute.Tensor):
    i = cute.arch.thread_idx()[0]
    out[i // 4, i % 4] = x[i // 4, i % 4] + y[i // 4, i % 4]

@cute.jit
def {{kernel_name()}}_jit(x: cute.Tensor, y: cute.Tensor, out: cute.Tensor, stream):
    {{kernel_name}}_kernel(x, y, out).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)

{{def_kernel("input_a", "input_b")}}
    a, b = from_dlpack(input_a), from_dlpack(input_b, assumed_align=16).mark_layout_dynamic()
    {{kernel_name}}_jit(a, b, from_dlpack({{get_output()}}), cuda.CUstream(stream))
    return {{get_output()}}
"""


@pytest.fixture(autouse=True)
def registry() -> Generator[None]:
    before = dict(CuteDSLTemplate.all_templates)
    yield
    CuteDSLTemplate.all_templates.clear()
    CuteDSLTemplate.all_templates.update(before)


def window(name: str, *size: int, dtype: torch.dtype = torch.float32, offset: int = 0) -> View:
    sizes = tuple(map(const, size))
    return View(name, sizes, ix.contiguous_strides(sizes), const(offset), dtype)


def memory(name: str, *size: int, dtype: torch.dtype = torch.float32) -> Buffer:
    sizes = tuple(map(const, size))
    return Buffer(name, dtype, torch.device("cuda", 0), sizes, ix.contiguous_strides(sizes))


def kernel(*inputs: View, output: View | None = None, **more: object) -> CuteDSLTemplateKernel:
    return CuteDSLTemplateKernel("k", inputs, output, **more)  # type: ignore[arg-type]


def choice(source: str = SIMPLE, name: str = "simple", **params: object):
    choices: list[template.CuteDSLTemplateCaller] = []
    made = CuteDSLTemplate(name, source)
    inputs = [window("a", 2, 4), window("b", 2, 4)]
    reason = made.maybe_append_choice(choices, inputs, Layout(memory("c", 2, 4)), **params)
    return reason, choices


# ---- templates


def test_cd_k1_a_template_is_parsed_once_and_registers_itself() -> None:
    made = CuteDSLTemplate("k1", SIMPLE, subgraph_fn=1, mask_fn=2)
    assert CuteDSLTemplate.all_templates["k1"] is made
    assert CuteDSLTemplate("k1_too", SIMPLE).template is made.template
    assert (made.subgraph_fn, made.mask_fn) == (1, 2)


def test_cd_k2_names_are_unique_and_the_first_stays() -> None:
    first = CuteDSLTemplate("k2", SIMPLE)
    with pytest.raises(AssertionError, match="'k2' already: names are unique"):
        CuteDSLTemplate("k2", "other")
    assert CuteDSLTemplate.all_templates["k2"] is first


def test_cd_k3_k4_imports_are_lines_without_indentation() -> None:
    lines = kernel().gen_imports().splitlines()
    assert len(lines) == 8 and not any(line.startswith(" ") for line in lines)
    for part in ("import torch", "import cutlass", "import cutlass.cute as cute",
                 "from cutlass.cute.runtime import from_dlpack",
                 "import cuda.bindings.driver as cuda", "import operator",
                 "from cutlass._mlir.dialects import math as mlir_math",
                 "from tilewright.gemm.cutedsl import device as tw"):  # fmt: skip
        assert part in lines


def test_cd_k5_a_render_begins_with_the_imports_and_has_the_body() -> None:
    made = kernel().render(template.parsed("x = {{NAME}}\n"), NAME=7)
    assert isinstance(made, PartialRender)
    assert made.text.strip().startswith("import torch") and "x = 7" in made.finalize_all()


def test_cd_k6_what_a_template_can_call() -> None:
    k = kernel(window("a", 2), output=window("c", 2))
    found = k.environment()
    for name in ("def_kernel", "kernel_name", "gen_defines", "get_output", "modification",
                 "get_tensor_buffers", "unpack_buffers", "set_cute_hash", "load_input",
                 "store_output"):  # fmt: skip
        assert callable(found[name]), name
    assert found["input_nodes"] == k.input_nodes and found["output_node"] is k.output_node
    assert k.render(template.parsed("{{WIDTH}}"), WIDTH=3).finalize_all().strip().endswith("3")


def test_cd_k6_a_hash_of_the_text_marks_functions() -> None:
    def mark(source: str) -> str:
        return kernel().render(template.parsed(source)).finalize_all().splitlines()[-1]

    one, two = mark("{{set_cute_hash('f')}}"), mark("x = 1\n{{set_cute_hash('f')}}")
    assert one.startswith('f.__cute_hash__ = "') and one != two
    assert mark("{{set_cute_hash('f')}}") == one


def test_cd_k7_parameters_are_typed_constants_in_order() -> None:
    made = kernel().gen_defines(THREADS_PER_BLOCK=256, BLOCK_SIZE=128, ENABLE_FEATURE=True, F=1.5)
    assert made == (
        "THREADS_PER_BLOCK: cutlass.Constexpr = 256\nBLOCK_SIZE: cutlass.Constexpr = 128\n"
        "ENABLE_FEATURE: cutlass.Constexpr = True\nF: cutlass.Constexpr = 1.5\n"
    )
    _, (found,) = choice(THREADS=64)
    assert "THREADS: cutlass.Constexpr = 64" in found.rendered().text


def test_cd_k8_inputs_have_the_names_of_the_entry() -> None:
    k = kernel(window("buf_input1", 2), window("buf_input2", 2), window("third", 2),
               output=window("o", 2))  # fmt: skip
    token = k.def_kernel("custom_a", "custom_b")
    assert token == "<DEF_KERNEL>"
    text = PartialRender(token, k._hooks, frozenset({token})).finalize_all()
    head, *body = text.splitlines()
    assert head == "def k_main(arg_custom_a, arg_custom_b, arg_2_third, arg_o, stream):"
    assert body == ["    custom_a = arg_custom_a", "    custom_b = arg_custom_b"]
    with pytest.raises(ValueError, match="def_kernel was called before"):
        k.def_kernel("custom_a")
    with pytest.raises(ValueError, match="names 4 inputs: there are 3"):
        k.def_kernel("a", "b", "c", "d", suffix="other")


def test_cd_k8_sizes_known_at_run_time_are_arguments() -> None:
    s0 = sym("s0", hint=8)
    dynamic = View("a", (s0, const(4)), (const(4), const(1)), ix.ZERO, torch.float32)
    k = kernel(dynamic, output=window("o", 2))
    token = k.def_kernel("x")
    head = PartialRender(token, k._hooks, frozenset({token})).finalize_all().splitlines()[0]
    assert head == "def k_main(arg_x, arg_o, s0, stream):"


def test_cd_k9_the_output_is_an_argument_first() -> None:
    k = kernel(output=window("buf_test_output", 2))
    with pytest.raises(ValueError, match="buf_test_output"):
        k.get_output()
    k.args.output_buffers["buf_test_output"] = "arg_buf_test_output"
    assert k.get_output() == "arg_buf_test_output"


def test_cd_k10_views_of_one_buffer_are_arguments_of_their_own() -> None:
    choices: list[template.CuteDSLTemplateCaller] = []
    inputs = [window("qkv", 2, 4), window("qkv", 2, 4, offset=8)]
    reason = CuteDSLTemplate("k10", SIMPLE).maybe_append_choice(
        choices, inputs, Layout(memory("c", 2, 4)), THREADS=8)  # fmt: skip
    assert reason is None
    made = choices[0].rendered()
    assert "t_arg_input_a = cute.make_tensor(p_qkv, " in made.text
    assert "t_arg_input_b = cute.make_tensor(p_qkv + 8, " in made.text
    assert [name for (_, name), _ in made.params] == ["qkv", "c"]


# ---- subgraphs


def scaled(factor: float = 2.0) -> Subgraph:
    return Subgraph(build.op("mul", placeholder("score"), const(factor, torch.float32)))


def test_cd_k11_subgraphs_by_number() -> None:
    one, two = scaled(), scaled(3.0)
    k = kernel(subgraphs=[one, two])
    assert k._get_subgraph(0) is one and k._get_subgraph(1) is two
    with pytest.raises(AssertionError, match="no subgraph 2"):
        k._get_subgraph(2)
    k.body.append("x = 1")
    with pytest.raises(AssertionError, match="still open"):
        k._get_subgraph(0)


def modified(k: CuteDSLTemplateKernel, *tokens: str) -> str:
    text = "import_line = 0\n" + "\n".join(tokens)
    return PartialRender(text, k._hooks).finalize_all().split("\n", 1)[1]


def test_cd_k12_m4_bodies_are_apart_and_share_captured_tensors() -> None:
    table = memory("table", 16)
    reads = load("table", torch.float32, placeholder("m"))
    graph = Subgraph(build.op("add", placeholder("score"), reads), buffers=(table,))
    other = Subgraph(build.op("mul", placeholder("score"), reads), buffers=(table,))
    k = kernel(subgraphs=[graph, other])
    text = modified(k, k.modification(0, "first", score="s", m="i"),
                    k.modification(1, "second", score="first", m="i"))  # fmt: skip
    assert k.extra == {"table": "mem_table"}  # once
    names = [line.split(" = ")[0] for line in text.splitlines()]
    assert len(names) == len(set(names))
    values = torch.arange(16.0)
    found = evaluate(text, {"mem_table": [of(v) for v in values], "s": of(torch.tensor(2.5)),
                            "i": 5})  # fmt: skip
    assert float(found["second"].t) == (2.5 + 5.0) * 5.0


def test_cd_m4_a_body_within_another_and_again_computes_for_itself() -> None:
    """What one body names is nobody else's: under a mask that does not hold none of it is there."""
    reads = load("table", torch.float32, placeholder("m"))
    graph = Subgraph(build.op("add", placeholder("score"), reads), buffers=(memory("table", 16),))
    k = kernel(subgraphs=[graph])
    outer = k.modification(0, "one", mask="ok", score="s", m="i")
    text = modified(k, outer, k.modification(0, "two", score="one", m="i"))
    values = {"mem_table": [of(v) for v in torch.arange(16.0)], "s": of(torch.tensor(2.5)), "i": 5}
    for ok, one in ((True, 7.5), (False, 0.0)):
        found = evaluate(text, {**values, "ok": ok})
        assert (float(found["one"].t), float(found["two"].t)) == (one, one + 5.0)


def test_cd_m4_a_subgraph_can_end_in_a_store() -> None:
    store = Store("table", placeholder("m"), build.op("neg", placeholder("score")))
    k = kernel(subgraphs=[Subgraph(stores=(store,), buffers=(memory("table", 4),))])
    text = modified(k, k.modification(0, None, score="s", m="i"))
    held: dict[int, object] = {}
    evaluate(text, {"mem_table": held, "s": of(torch.tensor(1.5)), "i": 3})
    assert float(held[3].t) == -1.5  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="goes nowhere"):
        kernel(subgraphs=[scaled()]).modification(0, None, score="s")


class Forbidden:
    def __getitem__(self, at: object) -> object:
        raise AssertionError(f"element {at} is read")


@pytest.mark.parametrize("mask", [True, False])
def test_cd_m5_where_a_mask_is_false_nothing_is_loaded(mask: bool) -> None:
    graph = Subgraph(load("table", torch.float32, placeholder("m")), buffers=(memory("table", 4),))
    k = kernel(subgraphs=[graph])
    text = modified(k, k.modification(0, "got", mask="ok", fill=-7.0, m="i"))
    table = {1000: of(torch.tensor(3.0))} if mask else Forbidden()
    found = evaluate(text, {"mem_table": table, "ok": mask, "i": 1000})
    assert float(found["got"].t) == (3.0 if mask else -7.0)


@pytest.mark.parametrize("mask", [True, False])
def test_cd_m5_a_masked_load_inside_an_expression(mask: bool) -> None:
    ok = sym("ok", torch.bool)
    read = load("table", torch.bfloat16, const(9), ok)
    k = kernel(
        subgraphs=[
            Subgraph(
                build.op("cast", read, arg=torch.float32),
                buffers=(memory("table", 4, dtype=torch.bfloat16),),
            )
        ]
    )
    text = modified(k, k.modification(0, "got", ok="ok"))
    table = {9: of(torch.tensor(3.0, dtype=torch.bfloat16))} if mask else Forbidden()
    found = evaluate(text, {"mem_table": table, "ok": of(torch.tensor(mask))})
    assert float(found["got"].t) == (3.0 if mask else 0.0)


# ---- the vocabulary


def test_cd_k13_operations_over_variables() -> None:
    k = kernel()
    ops = CuteDSLOpOverrides(k)
    a, b = (CSEVariable(n, torch.float32, (32, 64)) for n in ("tensor_a", "tensor_b"))
    for name in ("add", "mul", "truediv", "maximum", "minimum"):
        assert isinstance(getattr(ops, name)(a, b), CSEVariable)
    for name in ("exp", "sqrt"):
        assert isinstance(getattr(ops, name)(a), CSEVariable)
    assert "tmp0 = (tensor_a + tensor_b)" in k.body
    assert ops._ensure_tensor_ssa("5.0", a, is_tensor=False) == "cute.full_like(tensor_a, 5.0)"
    assert ops._ensure_tensor_ssa(a, b) == "tensor_a"
    assert (
        ops.add(a, 5.0) == "tmp7"
        and k.body[-1] == "tmp7 = (tensor_a + cute.full_like(tensor_a, 5.0))"
    )


def test_cd_k14_what_there_is_not_is_named() -> None:
    ops = CuteDSLOpOverrides(kernel())
    with pytest.raises(NotImplementedError, match=r"bessel_j0\(tensor_a\): the CuTe DSL has no"):
        ops.bessel_j0(CSEVariable("tensor_a", torch.float32))
    with pytest.raises(NotImplementedError, match=r"frobnicate\(tensor_a, 2\): there is no such"):
        ops.frobnicate(CSEVariable("tensor_a", torch.float32), 2)
    with pytest.raises(NotImplementedError, match="float8_e4m3fnuz"):
        ops.to_dtype(CSEVariable("a", torch.float32), torch.float8_e4m3fnuz)
    assert ops.constant(float("-inf"), torch.float32) == 'float("-inf")'
    assert ops.constant(float("nan"), torch.float32) == 'float("nan")'


def test_cd_k14_every_operation_has_text_or_a_reason() -> None:
    assert set(vocabulary.OPS) | set(vocabulary.REASONS) == set(TABLE)
    assert not set(vocabulary.OPS) & set(vocabulary.REASONS)
    assert all(len(why) > 15 for why in vocabulary.REASONS.values())


def test_cd_k15_the_same_expression_is_computed_once() -> None:
    k = kernel()
    lines: list[str] = []
    first = k.cse.generate(lines, "x")
    assert k.cse.prefix == "tmp" and first.startswith("tmp")
    assert k.cse.generate(lines, "x") == first and lines == [f"{first} = x"]
    with k.cse.scope():
        inner = k.cse.generate(lines, "y")
    assert k.cse.generate(lines, "y") != inner  # a scope's names end with it


SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, 7.25, 1e-30, 1e30, float("inf"), float("-inf"),
           float("nan")]  # fmt: skip
INTEGERS = [0, 1, -1, 2, 7, -9, 31, 64, 100]


def samples(dtype: torch.dtype, positive: bool = False) -> list[torch.Tensor]:
    if dtype == torch.bool:
        return [torch.tensor(True), torch.tensor(False)]
    if dtype.is_floating_point:
        random = (torch.randn(6) * 4).tolist()
        return [torch.tensor(v, dtype=dtype) for v in (*SPECIAL, *random)]
    return [torch.tensor(abs(v) if positive else v).to(dtype) for v in INTEGERS]


KIND_OF = {name: (torch.float32, torch.float64) if row.floats_only
           else (torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool)
           for name, row in TABLE.items()}  # fmt: skip
_NO_BOOL = ("sub", "floordiv", "truncdiv", "mod", "fmod", "neg", "shl", "shr", "pow", "sign", "abs")
_DIVIDES = ("floordiv", "truncdiv", "mod", "fmod")
_WHOLE = ("bit_and", "bit_or", "bit_xor", "bit_not", "shl", "shr")


def dtypes(name: str) -> list[torch.dtype]:
    found = list(KIND_OF[name])
    if name in _WHOLE:
        found = [d for d in found if not d.is_floating_point]
    if name in _NO_BOOL:
        found = [d for d in found if d != torch.bool]
    if name == "pow":
        found = [d for d in found if d.is_floating_point]
    return found


CASES = [(name, dtype) for name in vocabulary.OPS if name not in ("cast", "bitcast")
         for dtype in dtypes(name)]  # fmt: skip


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=lambda v: str(v).removeprefix("torch."))
def test_cd_k14_text_means_what_the_table_says(name: str, dtype: torch.dtype) -> None:
    """On fresh numbers and on those with an edge."""
    row = TABLE[name]
    kinds = [torch.bool if name == "where" and k == 0 else dtype for k in range(row.arity)]
    operands = [sym(f"v{k}", d) for k, d in enumerate(kinds)]
    result = torch.bool if row.result == "bool" else dtype
    node = make(name, result, tuple(operands))
    text = vocabulary.text(node, *(f"v{k}" for k in range(row.arity)))
    code = compile(f"out = {text}", "<op>", "exec")
    grids = [samples(d, positive=name in ("shl", "shr") and k == 1) for k, d in enumerate(kinds)]
    places = torch.cartesian_prod(*(torch.arange(len(g)) for g in grids)).reshape(-1, row.arity)
    names = evaluate("")
    for at in places.tolist():
        values = [g[i] for g, i in zip(grids, at, strict=True)]
        if name in _DIVIDES and not dtype.is_floating_point and int(values[1]) == 0:
            continue  # an error of the program's own
        if name in ("shl", "shr") and int(values[1]) >= 8 * dtype.itemsize:
            continue
        scope = {**names, **{f"v{k}": of(v) for k, v in enumerate(values)}}
        exec(code, scope)
        expected = row.ref(*values)
        found = scope["out"].t
        assert found.dtype == expected.dtype, (name, values)
        torch.testing.assert_close(found, expected, equal_nan=True, rtol=2e-6, atol=0.0,
                                   msg=lambda m, v=values: f"{name}{v}: {m}")  # fmt: skip


CASTS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int16,
         torch.int32, torch.int64, torch.uint8, torch.bool]  # fmt: skip


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("to", [*CASTS, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("source", CASTS, ids=str)
def test_cd_k14_casts_round_as_eager(source: torch.dtype, to: torch.dtype) -> None:
    whole = not to.is_floating_point
    numbers = [0.0, 1.0, -1.0, 2.5, -3.5, 100.0, 447.0, 1e-8, 3.14159]
    numbers += [] if whole else [1e6, float("nan")]
    if source == torch.bool:
        numbers = [0.0, 1.0]
    if to == torch.uint8 or source == torch.uint8:
        numbers = [abs(v) for v in numbers if abs(v) < 256]
    if to == torch.float8_e4m3fn:
        numbers = [v for v in numbers if v == v or source.is_floating_point]
    for v in numbers:
        if not source.is_floating_point and v != v:
            continue
        value = torch.tensor(v).to(source) if v == v else torch.tensor(v, dtype=source)
        node = make("cast", to, (sym("v0", source),), to)
        found = evaluate(f"out = {vocabulary.text(node, 'v0')}", {"v0": of(value)})["out"].t
        assert found.dtype == to
        torch.testing.assert_close(
            found.to(torch.float64),
            value.to(to).to(torch.float64),
            equal_nan=True,
            rtol=0,
            atol=0,
            msg=f"{value} to {to}",
        )


def test_an_index_used_as_a_number_and_as_a_place() -> None:
    n = var("n", const(100))
    value = build.op("add", build.op("cast", n, arg=torch.float32),
                     load("t", torch.float32, ix.mod(ix.add(ix.mul(n, 3), 1), 7)))  # fmt: skip
    w = Writer(CSE(), lambda e: "i", lambda b: f"mem_{b}")
    made = w.value(value)
    table = [of(torch.tensor(float(10 * k))) for k in range(7)]
    found = evaluate("\n".join((*w.lines, f"out = {made}")),
                     {"i": KINDS[torch.int32](5), "mem_t": table})  # fmt: skip
    assert float(found["out"].t) == 5.0 + 20.0


# ---- choices


def test_cd_k16_a_choice_or_the_reason_there_is_none() -> None:
    reason, (one,) = choice(THREADS=8)
    assert reason is None and one.name.startswith("cutedsl_simple_")
    choices = [one]
    again = one.template.maybe_append_choice(choices, one.input_nodes, one.layout, THREADS=8)
    two = choices[1]
    assert again is None and two.name != one.name and two.hash_key() == one.hash_key()
    assert int(two.name.rpartition("_")[2]) == int(one.name.rpartition("_")[2]) + 1
    assert one.description == "THREADS=8"
    assert one.info_dict() == {"name": one.name, "backend": "CuteDSL", "template": "simple",
                               "THREADS": 8}  # fmt: skip
    three: list[template.CuteDSLTemplateCaller] = []
    one.template.maybe_append_choice(three, one.input_nodes, one.layout, THREADS=16)
    assert three[0].hash_key() != one.hash_key()


def test_what_is_no_template() -> None:
    with pytest.raises(ValueError, match=r"the template no_jinja is not Jinja: .* line 2: {{b"):
        CuteDSLTemplate("no_jinja", "a\n{{b\n")
    assert "no_jinja" not in CuteDSLTemplate.all_templates


@pytest.mark.parametrize("params", [{"THREADS": torch.tensor(8)}, {"not a name": 8}])
def test_parameters_are_constants(params: dict[str, Any]) -> None:
    reason, choices = choice(**params)
    assert choices == [] and "no constant of the text" in str(reason)


@pytest.mark.parametrize(("source", "said"), [
    ("{{missing}}", "'missing' is undefined"),
    ("{{def_kernel('a', 'b', 'c')}}\n    pass", "names 3 inputs"),
    ("{{def_kernel('a', 'b')}}\n    return 1", "calls no @cute.jit function"),
    ("{{def_kernel('a', 'b', suffix='other')}}\n    pass", "no function .*_main; it has .*_other"),
    ("{{def_kernel('a', 'b')}}\n    a.cuda()", "an entry uses 'cuda' of a tensor"),
])  # fmt: skip
def test_cd_k16_k19_bad_templates_say_why(source: str, said: str) -> None:
    reason, choices = choice(source, name="bad")
    assert choices == [] and isinstance(reason, NotImplementedError)
    with pytest.raises(NotImplementedError, match=said):
        raise reason


def test_cd_k19_templates_of_the_four_rules_work_unchanged() -> None:
    reason, (one,) = choice(THREADS=8)
    assert reason is None
    made = one.rendered()
    assert "def cutedsl_simple" in made.text and made.entry.endswith("_main_flat")
    last = made.text.rstrip().splitlines()[-1].strip()
    assert last == f"{one.name}_jit(t_arg_input_a, t_arg_input_b, t_arg_c, stream)"
    assert f"def {one.name}_main(" not in made.text  # it has run


def test_cd_k20_inputs_that_are_written() -> None:
    choices: list[template.CuteDSLTemplateCaller] = []
    CuteDSLTemplate("k20", SIMPLE).maybe_append_choice(
        choices, [window("a", 2, 4), window("b", 2, 4)], Layout(memory("c", 2, 4)),
        mutated=["a"], THREADS=8)  # fmt: skip
    assert choices[0].mutated == ("a",) and choices[0].kernel().mutated == ("a",)


TWO_ENTRIES = (
    SIMPLE
    + """
{{def_kernel("p", "q", suffix="turned")}}
    {{kernel_name}}_jit(from_dlpack(q), from_dlpack(p), from_dlpack({{get_output()}}), stream)
"""
)


def test_cd_m6_entries_have_suffixes_of_their_own() -> None:
    made = CuteDSLTemplate("m6", TWO_ENTRIES)
    choices: list[template.CuteDSLTemplateCaller] = []
    inputs, layout = [window("a", 2, 4), window("b", 2, 4)], Layout(memory("c", 2, 4))
    assert made.maybe_append_choice(choices, inputs, layout, THREADS=8) is None
    assert made.maybe_append_choice(choices, inputs, layout, THREADS=8, suffix="turned") is None
    main, other = (c.rendered() for c in choices)
    assert main.entry.endswith("_main_flat") and other.entry.endswith("_turned_flat")
    assert main.text.rstrip().endswith("(t_arg_input_a, t_arg_input_b, t_arg_c, stream)")
    assert other.text.rstrip().endswith("(t_arg_input_b, t_arg_input_a, t_arg_c, stream)")
    names = [set(re.findall(r"^def (\w+)", made.text, re.M)) for made in (main, other)]
    assert min(map(len, names)) >= 3 and not names[0] & names[1]  # both can be in one module


def test_an_entry_cannot_decide_by_what_is_known_at_run_time() -> None:
    s0 = sym("s0", hint=8)
    dynamic = View("a", (s0,), (const(1),), ix.ZERO, torch.float32)
    k = kernel(dynamic, output=window("o", 2))
    source = "@cute.jit\ndef j(x): pass\n{{def_kernel('x')}}\n    j(x) if x.shape[0] else None"
    text = k.render(template.parsed(source)).finalize_all()
    with pytest.raises(NotImplementedError, match="depends on s0, which is known only at run time"):
        entry.flattened(k, text)


def test_hooks_of_a_template_are_known() -> None:
    _, (plain,) = choice(THREADS=8)
    assert plain.hooked == (False, frozenset())


def test_a_position_too_few_is_an_error() -> None:
    source = "{{def_kernel('x', 'y')}}\n    pass\n{{load_input('x', 'v', 'm')}}"
    reason, _ = choice(source, name="positions")
    assert "takes 2 positions, not 1" in str(reason)


def test_fused_values_are_for_the_place_they_are_read_at() -> None:
    m, n = var("m", const(2)), var("n", const(4))
    value = build.op("mul", load("z", torch.float32, ix.add(ix.mul(m, 4), n)),
                     const(0.5, torch.float32))  # fmt: skip
    fused = Fused({0: value}, ((m, n), (m, n)), memory={"z": memory("z", 2, 4)})
    k = kernel(window("a", 2, 4), window("b", 2, 4), output=window("c", 2, 4), fused=fused)
    text = k.render(
        template.parsed("{{def_kernel('x', 'y')}}\n    pass\n{{load_input('x', 'v', 'r', 'q')}}")
    ).finalize_all()
    assert "mem_z[((r * 4) + q)]" in text and k.load_hooks == {0}
