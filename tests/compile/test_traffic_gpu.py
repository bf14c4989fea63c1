"""Memory traffic on a card that is not there: the same programs and bounds as on the CPU."""

from __future__ import annotations

import pytest

from tests.pretend import run
from tests.traffic import BY_NAME, Counted, count


def on_card(name: str) -> Counted:
    return count(BY_NAME[name], "cuda")


@pytest.mark.parametrize("name", BY_NAME)
def test_case(name: str) -> None:
    assert run(on_card, name).elements <= BY_NAME[name].limit
