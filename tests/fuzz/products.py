"""Random programs around matrix products: few rows and many, quantised weights, dynamic sizes.

A program is layers: something before the product, the product in one of the ways to write it, and
something after. Sizes are small and odd; what is drawn is the order, the types, the layouts, what
is shared between products, and what is returned.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.fuzz.generate import Growth, Input, Line, Program

ROWS = (*range(1, 17), 1, 1, 2, 17, 31, 33, 67)
INNER = (1, 2, 3, 8, 16, 17, 24, 31, 32, 40, 48, 64, 65)
FLOATS = (torch.float32, torch.float32, torch.bfloat16, torch.bfloat16, torch.float16)
LAYOUTS = ("plain", "plain", "plain", "transposed", "strided", "offset", "padded")
MOST_PRODUCTS = 3

_BEFORE = (
    "{0} + 1", "F.relu({0})", "{0} * 0.5 - 1", "torch.tanh({0})", "F.silu({0})",
    "{0}.to(torch.float32)", "{0}.to(torch.bfloat16)", "{0}.to(torch.float16)",
    "{0}.to(torch.float32).to({0}.dtype)", "F.layer_norm({0}, {0}.shape[-1:])", "{0}.contiguous()",
    "torch.where({0} > 0, {0}, 0.1 * {0})", "{0} / ({0}.abs().amax(-1, keepdim=True) + 1)",
    "{0}.clone()", "F.pad({0}, (1, 0))[..., 1:]", "{0}.flip(0)", "{0}[:]",
    "{0}[:1]", "{0}[-1:]", "{0}[::2]", "{0}[1:]", "{0}.roll(1, 0)", "torch.cat(({0}, {0}))",
    "{0}[:1].expand_as({0})", "F.rms_norm({0}, {0}.shape[-1:])", "{0}.mT",
    "{0}[torch.arange({0}.shape[0] - 1, -1, -1, device={0}.device)]", "{0}.repeat(2, 1)",
)  # fmt: skip
_AFTER = (
    "F.gelu({0})", "F.gelu({0}, approximate='tanh')", "F.relu({0})", "torch.sigmoid({0}) * {0}",
    "{0} * 0.125", "{0} + 1", "{0}.to(torch.float32)", "{0}.to(torch.bfloat16)",
    "F.softmax({0}, -1)", "{0}.sum(-1)", "{0}.mean(0)", "{0}.amax(-1, keepdim=True)",
    "{0}.mT.contiguous()", "{0}.mT + 1", "{0}.reshape(-1)", "{0}[..., 1:]", "{0}[:1]",
    "torch.cat(({0}, {0} * 2), -1)", "torch.cat(({0}.cos(), {0}), 0)",
    "({0}, {0}.square().sum(-1, keepdim=True))[0] - 1",
    "{0}.sin() + {0}.cos()", "F.dropout({0}, 0.5, training=False)", "torch.clamp({0}, -1, 1)",
    "({0} > 0).to({0}.dtype) * {0}", "torch.maximum({0}, {0}.mean(-1, keepdim=True))",
    "{0}.unsqueeze(1) * {0}.unsqueeze(-1).mean(-2, keepdim=True)",
    "{0}.clone().relu_()", "({0} * 1).mul_(0.5).add_(1)", "{0}.add_(1)", "torch.relu_({0})",
    "{0}.clone().index_fill_(0, torch.zeros(1, dtype=torch.int64, device={0}.device), 0.5)",
    "torch.empty_like({0}).copy_({0}).cos_()", "{0}.chunk(2, -1)[0] * 2", "{0}.cumsum(-1) * 0.125",
    ("{0}.new_zeros({0}.shape).index_add(0, "
     "torch.arange({0}.shape[0], device={0}.device) // 2, {0})"),
    "F.scaled_dot_product_attention({0}[None], {0}[None], {0}[None])[0]",
)  # fmt: skip
_BOTH = (
    "{0} + {1}", "{0} * {1}", "F.silu({0}) * {1}", "{0} - 0.5 * {1}", "torch.maximum({0}, {1})",
    "torch.cat(({0}, {1}), -1)", "{0} + {1}.detach()", "torch.where({0} > {1}, {0}, {1})",
    "{0} + F.relu({1})", "{0}.add({1}, alpha=2)", "{0}.add_({1})", "{0}.clone().mul_({1})",
    "torch.addcmul({0}, {0}, {1}, value=0.5)", "torch.lerp({0}, {1}.expand_as({0}), 0.25)",
)  # fmt: skip
_QUANTISED = (
    "{0}.to(DTYPE)", "{0}.to(DTYPE) * 0.0625", "{0}.to(torch.float32) * 0.0625",
    "({0} - 3).to(DTYPE) / 16", "{0}.to(torch.float32).to(DTYPE)",
    "{0}.to(DTYPE) * (torch.arange({0}.shape[1], device={0}.device) % 3 + 1).to(DTYPE)",
    "{0}.to(DTYPE) * (torch.arange({0}.shape[0], device={0}.device) % 3 + 1).to(DTYPE)[:, None]",
)  # fmt: skip
_PACKED = (
    "(torch.stack(({0} & 15, {0} >> 4), -1).flatten(-2).to(DTYPE) - 8) * 0.125",
    "torch.cat(({0} & 15, {0} >> 4), -1).to(DTYPE) * 0.0625 - 0.5",
    "((torch.stack(({0} >> 4, {0} & 15), -1).reshape({0}.shape[0], -1)) - 8.0).to(DTYPE) / 16",
)  # fmt: skip
# W is a right operand, LINEAR its transpose; both may be texts that unpack a quantised one.
_MATRICES = (
    "torch.mm({0}, W)", "torch.addmm({2}, {0}, W)", "torch.addmm({2}, {0}, W, alpha=0.5, beta=2)",
    "torch.mm({0}, W) + {2}", "torch.addmm({2}, {0}, W, beta=0)",
    "torch.einsum('mk,kn->nm', {0}, W)", "torch.mm({0}, W) + torch.mm({0} * 0.5, W)",
    "torch.mm((W).mT, {0}.mT)", "torch.baddbmm({2}, {0}[None], (W)[None])",
    "torch.bmm({0}[None].expand(2, -1, -1), (W).expand(2, -1, -1))[1]",
    "torch.baddbmm({2}, {0}[None].expand(2, -1, -1), (W)[None].expand(2, -1, -1))",
    "torch.bmm(torch.stack(({0}, {0} + 1)), torch.stack((W, (W) * 0.5)))",
    # few rows, vectors, nothing at all
    "torch.mm({0}[:1], W)", "torch.matmul({0}[0], W)", "torch.mv((W).mT, {0}[-1])[None]",
    "torch.addmv({2}, LINEAR, {0}[0])[None]", "torch.cat((torch.mm({0}[:0], W), torch.mm({0}, W)))",
    "torch.mm({0}[:, :0], (W)[:0]) + {2}", "torch.addmm({2}, {0}[:, :0], (W)[:0])",
    "torch.mm({0}[:, 1:], (W)[1:])", "torch.mm({0}[::2], W)", "torch.inner({0}, LINEAR)",
    # several that share operands
    "torch.cat((torch.mm({0}, W), F.linear({0}, LINEAR) * 2), -1)",
    "F.silu(torch.mm({0}, W)) * torch.mm({0}, (W) + 1)",
    "torch.stack([torch.mm(part, W) for part in (torch.relu({0}), {0}, {0} * 2)]).sum(0)",
    "torch.mm({0}, torch.cat((W, (W) * 2), -1)).chunk(2, -1)[1] + 1",
    "torch.cat([F.linear({0}, part) for part in (LINEAR).chunk(2)], -1)",
    "torch.linalg.multi_dot(({0}, W, (W).mT))",
    # other names of a product
    "F.conv1d({0}.mT[None], (LINEAR)[..., None])[0].mT",
    "F.conv2d({0}.mT[None, :, :, None], (LINEAR)[..., None, None])[0, ..., 0]",
    "F.conv2d({0}[:, :, None, None], (LINEAR)[..., None, None], {2}).relu()[..., 0, 0]",
    "torch.tensordot({0}, W, 1)", "torch.einsum('mk,nk->mn', {0}, LINEAR)",
    "torch.einsum('mk,kn,mk->mn', {0}, W, {0})", "({0}[:, :, None] * (W)[None]).sum(1)",
    # written into something
    "torch.mm({0}, W).add_({2})", "torch.mm({0}, W).relu_().mul_(0.5)",
    "{2}.clone().addmm_({0}, W, alpha=0.5)", "{2}.addmm_({0}, W)", "{2}.add_(torch.mm({0}, W))",
    "{2}.clone().index_add_(0, torch.arange({0}.shape[0], device={0}.device), torch.mm({0}, W))",
    ("{2}.index_copy_(0, torch.zeros(1, dtype=torch.int64, device={0}.device), "
     "torch.mm({0}[:1], W))"),
)  # fmt: skip
_BATCHES = (
    "torch.bmm({0}, (W).expand({0}.shape[0], -1, -1))",
    "torch.baddbmm({2}, {0}, (W).expand({0}.shape[0], -1, -1), alpha=2)",
    "torch.einsum('bmk,kn->bnm', {0}, W)", "torch.einsum('bmk,kn->mn', {0}, W)",
    "torch.addbmm({2}, {0}, (W).expand({0}.shape[0], -1, -1))",
    "F.conv1d({0}.mT, (LINEAR)[..., None], {2})", "torch.bmm({0}, {0}.mT).softmax(-1)",
    "torch.stack([torch.mm(part, W) for part in {0}.unbind(0)])",
    "F.linear({0}[:, -1:], LINEAR)", "F.linear({0}[:1].expand_as({0}), LINEAR)",
)  # fmt: skip


def generate(seed: int) -> Program:
    with torch.device("cpu"):
        return _Products(seed).grow()


class _Products(Growth):
    """Inputs are drawn for a chain of sizes; each line looks for values whose sizes fit."""

    def _sizes(self) -> dict[str, int]:
        """Of one call; with dynamic sizes there may be a call with a single row."""
        rng = self.rng
        inner = INNER[1:] if self.dynamic else INNER
        return {"A": rng.choice(ROWS), "B": rng.choice(inner), "C": rng.choice(inner),
                "D": rng.choice(inner)}  # fmt: skip

    def grow(self) -> Program:
        rng = self.rng
        if self.dynamic:  # not all sizes are; the others are those of the first call
            self.fixed = {n for n in "BCD" if rng.random() < 0.7}
            if rng.random() < 0.3:  # there and back, through a single row
                self.sizes.insert(1, {**self.sizes[0], "A": 1})
                self.values.append([])
            for sizes in self.sizes[1:]:
                sizes.update({n: self.sizes[0][n] for n in self.fixed})
        else:
            self.fixed = set("ABCD")
        self.dtype = rng.choice(FLOATS)
        self._inputs()
        wanted, products, tries = rng.randint(1, MOST_PRODUCTS), 0, 0
        while products < wanted and tries < 60:
            tries += 1
            draw = rng.random()
            if draw < 0.25:
                self._one(_BEFORE)
            elif draw < 0.65:
                products += self._product()
            elif draw < 0.8:
                self._two()
            else:
                self._one(_AFTER)
        for _ in range(rng.randint(0, 4)):
            rng.choice((lambda: self._one(_AFTER), self._two))()
        return self._program()

    def _program(self) -> Program:
        rng = self.rng
        made = range(len(self.inputs), len(self.exact))
        used = {k for line in self.lines for k in line.operands}
        outputs = [k for k in made if k not in used or rng.random() < 0.15]
        return Program(tuple(self.inputs), tuple(self.lines), tuple(outputs), tuple(self.exact),
                       tuple(self.sizes), self.dynamic, self.seed)  # fmt: skip

    # ---- inputs

    def _n(self, name: str) -> int | str:
        return self.sizes[0][name] if name in self.fixed else name

    def _matrix(self, rows: str, columns: str, dtype: torch.dtype | None = None) -> None:
        rng = self.rng
        kind = dtype or self.dtype
        grad = self.grad and kind.is_floating_point and rng.random() < 0.7
        self._add_input(Input((self._n(rows), self._n(columns)), kind, rng.choice(LAYOUTS), grad,
                              rng.randrange(10**6)))  # fmt: skip

    def _inputs(self) -> None:
        rng = self.rng
        self._matrix("A", "B")
        for inner, outer in (("B", "C"), ("C", "D"), ("B", "C"))[: rng.randint(1, 3)]:
            if rng.random() < 0.5:
                inner, outer = outer, inner  # as `linear` has it
            kind = rng.random()
            if kind < 0.3:
                self._matrix(inner, outer, torch.int8)
            elif kind < 0.4 and not self.dynamic and self.sizes[0][outer] % 2 == 0:
                half = (self.sizes[0][inner], self.sizes[0][outer] // 2)
                self._add_input(Input(half, torch.uint8, "plain", False, rng.randrange(10**6), 256))
            else:
                self._matrix(inner, outer)
        for name in rng.sample("ABCD", 2):
            shape: tuple[int | str, ...] = (self._n(name),) if name != "A" else (self._n(name), 1)
            self._add_input(Input(shape, self.dtype, "plain", self.grad and rng.random() < 0.5,
                                  rng.randrange(10**6)))  # fmt: skip
        if rng.random() < 0.5:
            self._matrix("A", rng.choice("CD"))
        if rng.random() < 0.2:
            lead = rng.choice((1, 2, 3))
            shape = (lead, self._n("A"), self._n("B"))
            self._add_input(Input(shape, self.dtype, "plain", False, rng.randrange(10**6)))

    # ---- lines

    def _append(self, text: str, operands: tuple[int, ...]) -> bool:
        line = Line(text, operands, exact=False)
        results = [self._try(line, values) for values in self.values]
        kinds = {None if r is None else (r.dtype, r.dim()) for r in results}
        if None in kinds or len(kinds) > 1 or any(not r.numel() for r in results if r is not None):
            return False
        self.lines.append(line)
        self.exact.append(False)
        for values, result in zip(self.values, results, strict=True):
            assert result is not None
            values.append(result)
        return True

    def _fitting(self, accepts: Callable[[Tensor], bool]) -> list[int]:
        return [k for k, t in enumerate(self.values[0]) if accepts(t)]

    def _recent(self, found: list[int]) -> int:
        return self.rng.choice(found[-4:] if self.rng.random() < 0.7 else found)

    def _one(self, texts: tuple[str, ...]) -> bool:
        found = self._fitting(lambda t: t.dtype.is_floating_point and t.dim() >= 2)
        return bool(found) and self._append(self.rng.choice(texts), (self._recent(found),))

    def _two(self) -> bool:
        """Two values of shapes that go together: a residual, a bias, a scale, a gate."""
        floats = self._fitting(lambda t: t.dtype.is_floating_point)
        made = [k for k in floats if k >= len(self.inputs)] or floats
        one = self._recent(made)
        shape = self.values[0][one].shape
        pairs = [k for k in floats if _goes(self.values[0][k].shape, shape)]
        return bool(pairs) and self._append(self.rng.choice(_BOTH), (one, self.rng.choice(pairs)))

    def _product(self) -> bool:
        lefts = self._fitting(lambda t: t.dtype.is_floating_point and t.dim() in (2, 3))
        left = self._recent(lefts)
        a = self.values[0][left]
        rights = self._fitting(lambda t: t.dim() == 2 and a.shape[-1] in (t.shape[0], _columns(t)))
        packed = [k for k in rights if not self.values[0][k].dtype.is_floating_point]
        if not rights or self.rng.random() < 0.05:
            return self._append("torch.matmul({0}, {0}.mT)", (left,))
        right = self.rng.choice(packed if packed and self.rng.random() < 0.7 else rights)
        b = self.values[0][right]
        weight = self._weight(a, b)
        ways = [(weight, f"({weight}).mT")] if a.shape[-1] == b.shape[0] else []
        ways += [(f"({weight}).mT", weight)] if a.shape[-1] == _columns(b) else []
        return self._written(left, right, *self.rng.choice(ways))

    def _weight(self, a: Tensor, b: Tensor) -> str:
        """The text of `{1}` as a matrix of the type of `{0}`, more or less."""
        if b.dtype == torch.uint8:
            text = self.rng.choice(_PACKED)
        elif not b.dtype.is_floating_point:
            text = self.rng.choice(_QUANTISED)
        else:
            return "{1}" if a.dtype == b.dtype else "{1}.to({0}.dtype)"
        return text.replace("{0}", "{1}").replace("DTYPE", "{0}.dtype")

    def _written(self, left: int, right: int, plain: str, linear: str) -> bool:
        """One of the ways to write a product; `{2}` is something to add."""
        a = self.values[0][left]
        more = [k for k, t in enumerate(self.values[0]) if t.dtype == a.dtype and t.dim() <= 2]
        b = self.values[0][right]
        results = [torch.Size((a.shape[-2], n)) for n in (b.shape[0], _columns(b))]
        fits = [k for k in more if any(_goes(self.values[0][k].shape, r) for r in results)]
        whole = [k for k in fits if self.values[0][k].shape in results]
        pools = (whole if self.rng.random() < 0.5 else [], fits, more, [left])
        added = self.rng.choice(next(pool for pool in pools if pool))
        texts = ["torch.matmul({0}, W)", "F.linear({0}, LINEAR)", "F.linear({0}, LINEAR, {2})"]
        texts += _MATRICES if a.dim() == 2 else _BATCHES
        text = self.rng.choice(texts)
        if ".dtype" in plain and "torch.float32)" in plain:
            text = text.replace("{0}", "{0}.to(torch.float32)")
        text = text.replace("W", plain).replace("LINEAR", linear)
        operands = (left, right, added) if "{2}" in text else (left, right)
        return self._append(text, operands)


def _columns(t: Tensor) -> int:
    """Of a weight, two of which may be in a byte."""
    return t.shape[1] * (2 if t.dtype == torch.uint8 else 1)


def _goes(a: torch.Size, b: torch.Size) -> bool:
    try:
        return torch.broadcast_shapes(a, b) == b
    except RuntimeError:
        return False


__all__ = ["generate"]
