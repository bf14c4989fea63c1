"""`python -m bench.show`: the kernels of benchmark programs without a card."""

from __future__ import annotations

import contextlib
import io

from tests.pretend import pretended


@pretended
def test_kernels_of_a_program_and_what_they_need() -> None:
    from bench import show  # believes in a card when it is imported

    programs, _ = show.LISTS["small"]
    (program,) = (p for p in programs if p.name == "mse 1024x16")
    with contextlib.redirect_stdout(io.StringIO()) as said:
        show.compiled(program, text=True, built=True)
    text = said.getvalue()
    assert text.startswith("## mse 1024x16\n-- inference 0: triton_red_fused_0")
    assert "@triton.jit" in text and "stack 0, bytes of a load 16" in text
