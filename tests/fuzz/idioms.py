"""What real models are made of, each as one line of a random program."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from tests.fuzz.kinds import Kind, deep, deep_float, fixed, matrix, number, whole, with_dim

ROTATED = "torch.cat((-n[..., n.shape[-1] // 2 :], n[..., : n.shape[-1] // 2]), -1)"
CROSSED = "torch.stack((-n[..., 1::2], n[..., : n.shape[-1] // 2 * 2 : 2]), -1).flatten(-2)"
NORMED = "{0} * torch.rsqrt({0}.square().mean(-1, keepdim=True) + 1e-5)"
CAUSAL = "torch.ones({0}.shape[-2:], dtype=torch.bool).triu(1)"
ROWS = "({1}.long().reshape(-1) % max({0}.shape[0], 1))"


def _matrix_float(t: Tensor) -> bool:
    return t.dtype.is_floating_point and t.dim() >= 2


def _long_rows(t: Tensor) -> bool:
    return _matrix_float(t) and t.shape[-1] > 1


def _plain_matrix(t: Tensor) -> bool:
    return t.dim() == 2


def _rotated(rng: random.Random, t: Tensor) -> str:
    """Heads normalised, then rotated."""
    normed = rng.choice((NORMED, "F.rms_norm({0}, {0}.shape[-1:])", "{0}",
                         "F.layer_norm({0}, {0}.shape[-1:])"))  # fmt: skip
    if t.shape[-1] % 2 == 0 and rng.random() < 0.5:
        turned = rng.choice((ROTATED, CROSSED))
        angle = "{0}[..., :1].clamp(-4, 4)"  # a large one would turn anywhere for a last bit
        return f"(lambda n, c: n * c.cos() + {turned} * c.sin())({normed}, {angle})"
    return f"(lambda n: {rng.choice((ROTATED, CROSSED))})({normed})"


def _masked(rng: random.Random, t: Tensor) -> str:
    """Scores of attention."""
    fill = rng.choice(("float('-inf')", "-1e4"))
    mask = rng.choice((CAUSAL, "({0} > 2)" if fill == "-1e4" else CAUSAL))
    masked = rng.choice((f"{{0}}.masked_fill({mask}, {fill})",
                         f"torch.where({mask}, torch.full((), {fill}, dtype={{0}}.dtype), {{0}})",
                         ("{0} + torch.zeros({0}.shape[-2:], dtype={0}.dtype)"
                          f".masked_fill({CAUSAL}, {fill})")))  # fmt: skip
    name = rng.choice(("softmax", "log_softmax", "softmax"))
    text = f"F.{name}({masked}, -1)"
    return f"{text}.clamp(min=-50)" if name == "log_softmax" else text


def _put(rng: random.Random, t: Tensor, i: Tensor) -> str:
    """Rows taken and added where they came from, or elsewhere."""
    return rng.choice((
        f"torch.zeros_like({{0}}).index_add(0, {ROWS}, {{0}}[{ROWS}])",
        f"{{0}}.index_put(({ROWS},), {{0}}[{ROWS}] * 2, accumulate=True)",
        f"torch.zeros_like({{0}}).index_add_(0, {ROWS}, {{0}}[{ROWS}]) + {{0}}",
        (f"{{0}}.scatter_add(0, {ROWS}.reshape(-1, *[1] * ({{0}}.dim() - 1)).expand(-1, "
         f"*{{0}}.shape[1:]), {{0}}[{ROWS}])"),
        f"{{0}}.index_reduce(0, {ROWS}, {{0}}[{ROWS}], 'mean')",
    ))  # fmt: skip


def _normed_groups(rng: random.Random, t: Tensor) -> str:
    groups = rng.choice(("1", "{0}.shape[1]", "2" if t.shape[1] % 2 == 0 else "1"))
    return rng.choice((f"F.group_norm({{0}}, {groups})",
                       "F.batch_norm({0}, None, None, training=True)",
                       f"F.silu(F.group_norm({{0}}, {groups})) + {{0}}"))  # fmt: skip


def _windows(rng: random.Random, t: Tensor) -> str:
    d = rng.randrange(t.dim())
    width = rng.choice((2, 3))
    return rng.choice((
        f"{{0}}.unfold({d}, {width}, {rng.choice((1, width))}).mean(-1)",
        (f"{{0}}.unfold({d}, {width}, 1) - {{0}}.narrow({d}, 0, {{0}}.shape[{d}] - {width - 1})"
         ".unsqueeze(-1)"),
        f"({{0}}.unfold({d}, 2, 1) * torch.arange(2)).sum(-1)",
        "F.pad({0}, (0, {0}.shape[-1] % 2)).reshape(*{0}.shape[:-1], -1, 2).mT.flatten(-2)",
        f"torch.roll({{0}}, ({width}, -1), ({d}, -1))",
        f"F.avg_pool1d({{0}}.reshape(1, -1, {{0}}.shape[-1]), {width}, 1, padding=1)",
        f"F.max_pool1d({{0}}.reshape(1, -1, {{0}}.shape[-1]), {width}, {width})",
    ))  # fmt: skip


def _woven(rng: random.Random, t: Tensor) -> str:
    """Parts put side by side, in turns, or over one another."""
    d = rng.randrange(t.dim())
    twice = "torch.empty(*{0}.shape[:-1], 2 * {0}.shape[-1], dtype={0}.dtype)"
    return rng.choice((
        f"(lambda o: (o[..., ::2].copy_({{0}}), o[..., 1::2].copy_({{0}} * 2), o)[-1])({twice})",
        ("(lambda o: (o[..., : {0}.shape[-1]].copy_({0} + 1), o[..., {0}.shape[-1] :]"
         f".copy_({{0}}), o)[-1])({twice})"),
        (f"torch.slice_scatter(torch.cat(({{0}}, {{0}} * 2), {d}), {{0}} - 1, {d}, 1, "
         f"1 + {{0}}.shape[{d}])"),
        "torch.cat((torch.stack(({0}, -{0}), -1).flatten(-2), {0}), -1)",
        f"(lambda o: (o.narrow({d}, 0, 1).fill_(3), o)[-1])({{0}} * 2)",
        f"(lambda o: (o.select({d}, 0).add_(1), o.select({d}, -1).mul_(2), o)[-1])({{0}}.clone())",
        f"torch.select_scatter({{0}}, {{0}}.select({d}, -1) * 2, {d}, 0)",
        f"torch.cat([p * k for k, p in enumerate({{0}}.split(2, {d}))], {d})",
    ))  # fmt: skip


def _changed_parts(rng: random.Random, t: Tensor) -> str:
    """Views of an argument or of a value changed in place."""
    d = rng.randrange(t.dim())
    return rng.choice((
        "{0}[1:].add_(1)", "{0}[..., ::2].mul_(2)", "{0}.flip(0).add_(1)",
        "{0}[..., ::2].copy_({0}[..., ::2] * 2)",
        f"{{0}}.transpose({d}, -1).sub_(1)",
        f"{{0}}.select({d}, 0).add_({{0}}.select({d}, -1).clone())",
        "{0}[..., :-1].add_({0}[..., 1:].clone())",
        "{0}.view(-1)[::3].fill_(1)", "{0}.unsqueeze(0)[0].abs_()",
        f"{{0}}.narrow({d}, 0, 1).copy_({{0}}.narrow({d}, 0, 1).flip(-1))",
        "{0}.mT.copy_({0}.mT + 1)" if t.dim() > 1 else "{0}.neg_()",
        f"{{0}}.chunk(2, {d})[-1].clamp_(-1, 1)",
        "{0}.diagonal().zero_()" if t.dim() == 2 else "{0}.masked_fill_({0} > 1, 0)",
        "{0}.expand(2, *{0}.shape)[1].add_(2)",
    ))  # fmt: skip


def _narrowed(rng: random.Random, t: Tensor) -> str:
    """Through a narrow type and back, or computed in it."""
    narrow = rng.choice((torch.bfloat16, torch.float16))
    return rng.choice((
        f"({{0}}.to({narrow}) * 2 + 1).to(torch.float32)",
        f"F.softmax({{0}}.to({narrow}), -1, dtype=torch.float32)",
        "F.layer_norm({0}.to(torch.float32), {0}.shape[-1:]).to({0}.dtype)",
        f"{{0}}.to({narrow}).to(torch.float32).sum(-1).to({narrow})",
        f"F.silu({{0}}.to(torch.float32)).to({narrow}) * {{0}}.to({narrow})",
        f"{{0}} + {{0}}.to({narrow}).mean(0)",
    ))  # fmt: skip


IDIOMS: tuple[Kind, ...] = (
    *[Kind((_long_rows,), _rotated, exact=False)] * 3,
    *[Kind((_matrix_float,), _masked, exact=False)] * 2,
    Kind((deep_float, deep_float), fixed(
        f"{NORMED} * {{1}}", f"{NORMED} * (1 + {{1}})", "F.silu({0}) * {1}",
        f"({NORMED}).to(torch.bfloat16) * {{1}}", "{0} + F.dropout({1}, 0.5, training=False)",
    ), exact=False),
    *[Kind((deep_float, whole), _put, exact=False)] * 2,
    Kind((whole, deep_float), fixed(
        "F.one_hot({0}.long() % 7, 7).to(torch.float32).mean(0)",
        "F.one_hot({0}.long() % 4, 4).to({1}.dtype).sum(0) + {1}.sum()",
        "F.embedding({0}.long() % max({1}.shape[0], 1), {1}.reshape({1}.shape[0], -1))",
        "torch.cumsum(F.one_hot({0}.long().reshape(-1) % 3, 3), 0)",
    ), exact=False),
    Kind((deep_float,), with_dim(
        "torch.cumsum({0}, DIM).sub({0})", "torch.logcumsumexp({0}, DIM)",
        "torch.cumsum({0}.square(), DIM).sqrt()", "torch.cumprod({0}.tanh(), DIM)",
    ), exact=False),
    Kind((deep,), with_dim("torch.cumsum(({0} > 0).long(), DIM) % 3",
                             "torch.cumsum({0} != 0, DIM)"), needs_exact=True),
    *[Kind((_matrix_float,), _normed_groups, exact=False)] * 2,
    *[Kind((deep_float,), _windows, exact=False)] * 2,
    *[Kind((deep,), _woven)] * 3,
    *[Kind((deep,), _changed_parts)] * 3,
    *[Kind((deep_float,), _narrowed, exact=False)] * 2,
    Kind((_matrix_float,), fixed(
        "-F.log_softmax({0}, -1).gather(-1, {0}.argmax(-1, keepdim=True)).mean()",
        "(F.softmax({0}, -1) * {0}).sum(-1)",
        "F.cross_entropy({0}.flatten(0, -2), {0}.argmax(-1).reshape(-1))",
    ), exact=False, needs_exact=True),
    Kind((_plain_matrix, matrix), fixed(
        "torch.einsum('ij,...kj->...ik', {0}, {1})",
        "F.scaled_dot_product_attention({0}[None, None], {0}[None, None], {0}[None, None])[0, 0]",
        "torch.baddbmm({0}[None], {0}[None], {0}.mT[None] @ {0}[None])[0]",
    ), exact=False),
    Kind((number,), fixed("{0}.diff(dim=0, prepend={0}[:1])",
        "torch.meshgrid({0}.reshape(-1)[:5], {0}.reshape(-1)[:3], indexing='ij')[0]")),
)  # fmt: skip
