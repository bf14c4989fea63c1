"""A process with a CPU-only torch that believes in one CUDA card: fake tensors, real compiler.

`cuda("sm_90")` makes the process it is called in believe; that cannot be undone, and it has to come
before torch is imported. A test does not call it: `run(function, ...)` calls a function of a
module in a child process that does, and `@pretended` runs a whole test there. Both start the child
once per pytest process. Kernels are never launched.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import importlib.util
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar

from bench.dynamo import without_statistics

P = ParamSpec("P")
R = TypeVar("R")

GUARD = Path(__file__).with_name("guard.cpp")


# ---- from an ordinary process


def run(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function of a module, found by its name, in a process that believes in a card."""
    name = (function.__module__, function.__qualname__)
    return _process().submit(_call, name, args, kwargs).result()


def pretended(test: Callable[P, None]) -> Callable[P, None]:
    """A test whose body runs in a process that believes in a card."""

    @functools.wraps(test)
    def outside(*args: P.args, **kwargs: P.kwargs) -> None:
        run(test, *args, **kwargs)

    return outside


@functools.cache
def _process() -> ProcessPoolExecutor:
    _library()  # built here, once, where a failure is easy to read
    spawn = multiprocessing.get_context("spawn")
    made = ProcessPoolExecutor(1, mp_context=spawn, initializer=_begin)
    with _no_main_module():
        made.submit(int).result()
    _started.append(made)
    return made


_started: list[ProcessPoolExecutor] = []


def stop() -> None:
    """End the process, if there is one: a pytest process may go without telling it."""
    _process.cache_clear()
    while _started:
        _started.pop().shutdown(wait=True, cancel_futures=True)


def _begin() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with who started it
    cuda()


@contextlib.contextmanager
def _no_main_module() -> Iterator[None]:
    """A child imports its parent's main module first, and that may import torch."""
    main = sys.modules["__main__"]
    hidden = {name: vars(main).pop(name) for name in ("__spec__", "__file__") if name in vars(main)}
    main.__spec__ = None
    try:
        yield
    finally:
        vars(main).update({"__spec__": None} | hidden)


def _call(name: tuple[str, str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    module, function = name
    without_statistics()
    found = functools.reduce(getattr, function.split("."), importlib.import_module(module))
    return getattr(found, "__wrapped__", found)(*args, **kwargs)


# ---- inside the process that believes


def cuda(target: str = "sm_90") -> None:
    """From here on torch has one card of this architecture, and no kernel can run."""
    _load()
    from tilewright import config

    config.cuda.arch = target
    _patch_torch(target)
    _patch_triton(target)


def _load() -> None:
    if "CUDA" in _loaded:
        return
    assert "torch" not in sys.modules, "torch is imported already: use pretend.run"
    # the guard's symbols are torch's own, which Python loads privately
    ctypes.CDLL(str(_torch_folder() / "lib" / "libtorch_cpu.so"), mode=ctypes.RTLD_GLOBAL)
    _loaded["CUDA"] = ctypes.CDLL(str(_library()))


_loaded: dict[str, ctypes.CDLL] = {}


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def _library() -> Path:
    """The guard, built once for a torch and a source."""
    torch = _torch_folder()
    key = hashlib.sha256(GUARD.read_bytes() + (torch / "version.py").read_bytes()).hexdigest()
    made = Path(tempfile.gettempdir()) / f"tilewright_pretend_{os.getuid()}_{key[:16]}.so"
    if not made.exists():
        own = made.with_suffix(f".{os.getpid()}")
        subprocess.run(
            ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{torch}/include", str(GUARD),
             "-o", str(own), f"-L{torch}/lib", "-ltorch_cpu", "-lc10"], check=True
        )  # fmt: skip
        own.rename(made)
    return made


def _patch_torch(target: str) -> None:
    import torch
    import torch._subclasses.fake_tensor
    from torch._dynamo.device_interface import CudaInterface

    from tilewright.target import Target

    _loaded["CUDA"].pretend_guard()
    # a real tensor, made for the card's context
    torch._subclasses.fake_tensor.init_gpu_context = _always(None)
    card = Target(target)
    major, minor = card.capability
    properties = SimpleNamespace(
        name=f"pretended {target}", major=major, minor=minor, total_memory=80 << 30,
        multi_processor_count=card.sms, max_threads_per_multi_processor=card.threads_per_sm,
        shared_memory_per_block=48 << 10, shared_memory_per_block_optin=card.shared_memory,
        shared_memory_per_multiprocessor=card.shared_memory_per_sm, L2_cache_size=card.l2,
        regs_per_multiprocessor=65536, warp_size=32, max_threads_per_block=1024,
        is_integrated=0, is_multi_gpu_board=0, gcnArchName="", uuid="pretended",
    )  # fmt: skip
    stream = SimpleNamespace(cuda_stream=0, stream_id=0, device=torch.device("cuda", 0))
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "_lazy_init": None,
        "device_count": 1,
        "current_device": 0,
        "set_device": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "synchronize": None,
        "current_stream": stream,
        "get_device_properties": properties,
        "get_device_capability": card.capability,
        "mem_get_info": (72 << 30, 80 << 30),
        "get_device_name": properties.name,
        "is_bf16_supported": True,
        "manual_seed": None,
        "manual_seed_all": None,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, _always(answer))
    torch.cuda.random.manual_seed_all = _always(None)
    answers |= {"exchange_device": 0, "maybe_exchange_device": 0, "get_raw_stream": 0}
    answers |= {"get_compute_capability": major * 10 + minor}
    answers |= {"is_triton_capable": True, "raise_if_triton_unavailable": None}
    for name in answers.keys() & vars(CudaInterface).keys():
        setattr(CudaInterface, name, staticmethod(_always(answers[name])))
    CudaInterface.Worker.get_device_properties = staticmethod(_always(properties))
    CudaInterface.Worker.current_device = staticmethod(_always(0))


def _patch_triton(target: str) -> None:
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from tilewright.target import Target

    card = Target(target)
    major, minor = card.capability
    sizes = {"max_shared_mem": card.shared_memory, "multiprocessor_count": card.sms,
             "max_num_regs": 65536, "warpSize": 32}  # fmt: skip
    driver.set_active(
        SimpleNamespace(
            is_active=_always(True),
            get_current_target=_always(GPUTarget("cuda", major * 10 + minor, 32)),
            get_current_device=_always(0),
            get_current_stream=_always(0),
            get_device_interface=_always(torch.cuda),
            get_active_torch_device=_always(torch.device("cuda", 0)),
            utils=SimpleNamespace(get_device_properties=_always(sizes)),
        )
    )


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: answer
