"""The pretended card: what torch believes, and that only the child process believes it."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests import pretend
from tests.pretend import pretended, run
from tilewright.target import Target


def seen(arch: str) -> tuple[tuple[int, int], Target]:
    pretend.cuda(arch)
    try:
        return torch.cuda.get_device_capability(), Target.of("cuda")
    finally:
        pretend.cuda()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_the_child_has_the_card_asked_for(arch: str) -> None:
    assert run(seen, arch) == (Target(arch).capability, Target(arch))


def test_this_process_is_left_alone() -> None:
    before = torch.cuda.is_available()
    run(seen, "sm_90")
    assert torch.cuda.is_available() == before


@pretended
def test_autograd_runs_on_fake_tensors() -> None:
    with FakeTensorMode():
        x = torch.empty(3, 4, device="cuda", requires_grad=True)
        (x.cos() @ x.t()).sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape and x.grad.device.type == "cuda"


@pretended
def fails() -> None:
    raise KeyError("said inside")


def test_a_failure_inside_is_a_failure_outside() -> None:
    with pytest.raises(KeyError, match="said inside"):
        fails()
