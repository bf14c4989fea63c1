"""`CuteDSLTemplate`: a kernel as CuTe DSL text with hooks, and the choices made of it.

    add = CuteDSLTemplate("add", source)
    choices = []
    add.maybe_append_choice(choices, input_nodes=[x, y], layout=out, THREADS=256)

`kernel.py` says what the text can call. A template whose text calls `store_output` can have what
follows fused to it, one that calls `load_input` what makes that input.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jinja2

from tilewright.gemm.cutedsl import toolchain
from tilewright.gemm.cutedsl.build import Request
from tilewright.gemm.cutedsl.entry import Rendered, flattened
from tilewright.gemm.cutedsl.kernel import MAIN, CuteDSLTemplateKernel, Fused, Mistake, Subgraph
from tilewright.ir import index as ix
from tilewright.ir.expr import Expr
from tilewright.ir.program import Buffer, View
from tilewright.runtime import store
from tilewright.target import Target

log = logging.getLogger("tilewright.choose")


@dataclass(frozen=True)
class Layout:
    """Where the result goes: memory of its own."""

    buffer: Buffer

    @property
    def size(self) -> tuple[Expr, ...]:
        return self.buffer.size

    @property
    def view(self) -> View:
        b = self.buffer
        return View(b.name, b.size, b.stride, ix.ZERO, b.dtype)


class CuteDSLTemplate:
    """Registers itself under its name, of which there is one. `reads_once`: every element of an
    input is loaded once, so that computing it there costs nothing more. `beside`: calls that need
    nothing of each other can share a launch, for its kernel picks its instance."""

    all_templates: ClassVar[dict[str, CuteDSLTemplate]] = {}
    _numbers: ClassVar[itertools.count[int]] = itertools.count()

    def __init__(self, name: str, source: str, subgraph_fn: Any = None, mask_fn: Any = None,
                 reads_once: bool = True, beside: bool = False) -> None:  # fmt: skip
        assert name not in self.all_templates, (
            f"there is a CuteDSLTemplate {name!r} already: names are unique, take another"
        )
        self.name, self.source = name, source
        self.subgraph_fn, self.mask_fn = subgraph_fn, mask_fn
        self.reads_once, self.beside = reads_once, beside
        try:
            self.template = parsed(source)
        except jinja2.TemplateSyntaxError as error:
            line = source.splitlines()[error.lineno - 1].strip()
            raise ValueError(
                f"the template {name} is not Jinja: {error.message}, at line {error.lineno}: {line}"
            ) from None
        self._said: set[str] = set()
        self.all_templates[name] = self

    @functools.cached_property
    def digest(self) -> str:
        return store.key("cutedsl template", self.name, self.source)

    def maybe_append_choice(self, choices: list[Any], input_nodes: Sequence[View],
                            layout: Layout, subgraphs: Sequence[Subgraph] = (),
                            mutated: Sequence[str] = (), suffix: str = MAIN,
                            **params: Any) -> NotImplementedError | None:  # fmt: skip
        """Append the choice of these parameters, or say why there is none."""
        name = f"cutedsl_{self.name}_{next(self._numbers)}"
        try:
            made = CuteDSLTemplateCaller(self, name, tuple(input_nodes), layout,
                                         tuple(params.items()), tuple(subgraphs), suffix,
                                         tuple(mutated))  # fmt: skip
            made.rendered()
        except Mistake as error:
            return self._warned(error)
        except NotImplementedError as error:
            return error
        except Exception as error:
            wrapped = Mistake(f"{self.name}: {type(error).__name__}: {_told(error)}")
            wrapped.__cause__ = error
            return self._warned(wrapped)
        choices.append(made)
        return None

    def _warned(self, error: Mistake) -> Mistake:
        """What is wrong with the template is said once, for the program runs without it."""
        said = re.sub(rf"(cutedsl_{re.escape(self.name)})_\d+", r"\1", str(error))
        said = said.removeprefix(f"{self.name}: ")
        if said not in self._said:
            self._said.add(said)
            log.warning("the template %s is not used: %s", self.name, said)
        return error


def _told(error: Exception) -> str:
    """Of text that is no Python also the line."""
    if isinstance(error, SyntaxError) and error.text:
        return f"{error.msg}: {error.text.strip()}"
    return str(error)


@functools.lru_cache(256)
def parsed(source: str) -> jinja2.Template:
    """Once for a text."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=False)
    return environment.from_string(source)


@dataclass(frozen=True)
class CuteDSLTemplateCaller:
    """A template with parameters, for inputs and a result: one choice."""

    template: CuteDSLTemplate
    name: str
    input_nodes: tuple[View, ...]
    layout: Layout
    params: tuple[tuple[str, Any], ...]
    subgraphs: tuple[Subgraph, ...] = ()
    suffix: str = MAIN
    mutated: tuple[str, ...] = ()
    fused: Fused = field(default_factory=Fused)
    instances: int = 1

    @property
    def description(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in sorted(self.params))

    def info_dict(self) -> dict[str, Any]:
        return {"name": self.name, "backend": "CuteDSL", "template": self.template.name,
                **dict(self.params)}  # fmt: skip

    def hash_key(self) -> str:
        """Of what will run; the number in its name has no part in it."""
        plain = replace(self, name="cutedsl").rendered()
        return store.key(self.template.digest, toolchain.version(), plain.text)

    def kernel(self) -> CuteDSLTemplateKernel:
        return CuteDSLTemplateKernel(self.name, self.input_nodes, self.layout.view, self.subgraphs,
                                     self.fused, self.mutated, self.instances)  # fmt: skip

    @functools.cached_property
    def _plain(self) -> CuteDSLTemplateKernel:
        """All hooks called."""
        kernel = self.kernel()
        kernel.render(self.template.template, **dict(self.params)).finalize_all()
        return kernel

    @functools.cached_property
    def hooked(self) -> tuple[bool, frozenset[int]]:
        """Whether what follows can be fused, and which inputs computed where they are read."""
        kernel = self._plain
        if self.withheld:
            return False, frozenset()
        return kernel.has_store_hook, frozenset(kernel.load_hooks)

    @property
    def withheld(self) -> str:
        """Why memory of what could be fused does not reach the kernel, or an empty string."""
        missing = {"get_tensor_buffers", "unpack_buffers"} - self._plain.hands_on
        hooks = self._plain.has_store_hook or self._plain.load_hooks
        if not hooks or not missing:
            return ""
        return f"the template does not call {' and '.join(sorted(missing))}: nothing can be fused"

    def with_fused(self, fused: Fused, input_nodes: Sequence[View], layout: Layout, name: str
                   ) -> CuteDSLTemplateCaller:  # fmt: skip
        return replace(self, fused=fused, input_nodes=tuple(input_nodes), layout=layout, name=name)

    def rendered(self) -> Rendered:
        kernel = self.kernel()
        text = kernel.render(self.template.template, **dict(self.params)).finalize_all()
        return flattened(kernel, text, self.suffix)

    def request(self, target: Target) -> Request:
        """Of a text that has no number in it: equal choices are compiled once."""
        made = replace(self, name=f"cutedsl_{self.template.name}").rendered()
        return Request(made.text, made.entry, tuple(kind for _, kind in made.params),
                       toolchain.architecture(target))  # fmt: skip
