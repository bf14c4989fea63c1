"""What another process is asked to do; it imports this."""

from __future__ import annotations

import ctypes
import os
import time

from tilewright import config


def number() -> float:
    return 3.14


def sleep() -> None:
    time.sleep(120)


def fail() -> None:
    raise RuntimeError("it went wrong")


def leave() -> None:
    os._exit(3)


def crash() -> None:
    ctypes.string_at(0)


def harm() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def process() -> int:
    return os.getpid()


def visible() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def option() -> int:
    return config.max_fusion_size
