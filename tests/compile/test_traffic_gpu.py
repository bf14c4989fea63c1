"""Memory traffic on a card that is not there: the same programs as on the CPU, exactly."""

from __future__ import annotations

import pytest

from tests.pretend import run
from tests.traffic import BY_NAME, count_by_name


@pytest.mark.parametrize("name", BY_NAME)
def test_case(name: str) -> None:
    case, found = BY_NAME[name], run(count_by_name, name, "cuda")
    assert (found.elements, found.moved) == case.expected("cuda")
    assert case.kernels in (None, found.kernels)
