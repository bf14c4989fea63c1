"""The process that compiles Triton kernels; run as a script, it imports Triton and no torch.

It never sees a GPU. Orders arrive on standard input, each a length and a pickled `dict`; each is
compiled in a fork of this process, in which Triton is already imported, so that a compiler that
crashes or hangs costs one kernel. A fork leaves its result (a pickled `dict`) in the file the order
names, put in place by a rename, and this process answers `number status` on standard output.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import pickle
import re
import selectors
import shutil
import signal
import sys
import tempfile
import time
import traceback
from typing import Any, NoReturn

Order = dict[str, Any]


class Server:
    def __init__(self, most: int) -> None:
        self.most = most
        self.waiting: list[Order] = []
        self.running: dict[int, tuple[Order, float]] = {}  # by process: the order, its deadline
        self.buffer = b""
        self.answers = os.dup(1)
        os.dup2(2, 1)  # whatever the compiler prints is not an answer

    def serve(self) -> None:
        wake, waker = os.pipe()
        os.set_blocking(waker, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        watch = selectors.DefaultSelector()
        watch.register(0, selectors.EVENT_READ)
        watch.register(wake, selectors.EVENT_READ)
        while True:
            for key, _ in watch.select(1.0):
                data = os.read(key.fd, 1 << 20)
                if key.fd == 0 and not data:
                    self.stop()
                    return
                if key.fd == 0:
                    self.take(data)
            self.reap()
            while self.waiting and len(self.running) < self.most:
                self.start(self.waiting.pop(0))

    def take(self, data: bytes) -> None:
        self.buffer += data
        while len(self.buffer) >= 8:
            size = int.from_bytes(self.buffer[:8], "little")
            if len(self.buffer) < 8 + size:
                return
            self.waiting.append(pickle.loads(self.buffer[8 : 8 + size]))
            self.buffer = self.buffer[8 + size :]

    def start(self, order: Order) -> None:
        process = os.fork()
        if process == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setpgid(0, 0)  # a hanging assembler is killed with its fork
            run(order)
        self.running[process] = (order, time.monotonic() + order["timeout"])

    def reap(self) -> None:
        for process, (order, deadline) in list(self.running.items()):
            found, status = os.waitpid(process, os.WNOHANG)
            if not found and time.monotonic() > deadline:
                self.kill(process)
                found, status = os.waitpid(process, 0)
            if found:
                del self.running[process]
                os.write(self.answers, f"{order['number']} {status}\n".encode())

    def kill(self, process: int) -> None:
        with contextlib.suppress(OSError):
            os.killpg(process, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)

    def stop(self) -> None:
        for process in self.running:
            self.kill(process)


def run(order: Order) -> NoReturn:
    """In a fork: compile, leave the result, end."""
    status = 1
    try:
        try:
            result = build(order)
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc(),
                      **place(error, order["text"])}  # fmt: skip
        draft = f"{order['result']}.{os.getpid()}.tmp"
        with open(draft, "wb") as file:
            pickle.dump(result, file)
        os.replace(draft, order["result"])
        status = 0
    finally:
        os._exit(status)  # no exit handlers: they belong to the parent


def place(error: BaseException, text: str) -> dict[str, Any]:
    """What Triton says of a line of the source, and which line that is."""
    found: dict[str, Any] = {}
    cause: BaseException | None = error
    while cause is not None:  # the innermost says most
        node: Any = getattr(cause, "node", None)
        source = getattr(cause, "src", None)
        start = text.find(source) if isinstance(source, str) else -1
        if start >= 0 and hasattr(node, "lineno"):
            found["line"] = text.count("\n", 0, start) + node.lineno
        said = getattr(cause, "error_message", None) or (None if node is not None else str(cause))
        if said:
            found["why"] = f"{said}".strip().splitlines()[0]
        cause = cause.__cause__
    return found


def build(order: Order) -> dict[str, Any]:
    """One kernel for one architecture: the binary and what the launcher must know of it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    repair()
    start = time.perf_counter()
    file = f"<{order['name']} of tilewright>"
    linecache.cache[file] = (len(order["text"]), None, order["text"].splitlines(True), file)
    namespace: dict[str, Any] = {"__name__": "kernel", "__file__": file}
    exec(compile(order["text"], file, "exec"), namespace)
    source = ASTSource(
        namespace[order["name"]], order["signature"], order["constants"], order["attributes"]
    )
    made: Any = triton.compile(
        source, target=GPUTarget("cuda", order["capability"], 32), options=order["options"]
    )
    facts = made.metadata
    return {
        "cubin": made.asm["cubin"],
        "ptx": made.asm.get("ptx", ""),
        "name": facts.name,
        "shared": facts.shared,
        "num_warps": facts.num_warps,
        "num_ctas": getattr(facts, "num_ctas", 1),
        "cooperative": bool(getattr(facts, "launch_cooperative_grid", False)),
        "pdl": bool(getattr(facts, "launch_pdl", False)),
        "global_scratch": int(getattr(facts, "global_scratch_size", 0) or 0),
        "profile_scratch": int(getattr(facts, "profile_scratch_size", 0) or 0),
        "version": triton.__version__,
        "seconds": time.perf_counter() - start,
    }


PAIR = re.compile(r"add\.s16x2\s+(\S+), (\S+), (\S+);")
APART = r"""{ .reg .b16 a, b, c, d; .reg .b32 by; mov.b32 by, \3;
	mov.b32 {a, b}, \2; mov.b32 {c, d}, by; add.s16 a, a, c; add.s16 b, b, d;
	mov.b32 \1, {a, b}; }"""


@functools.cache
def repair() -> None:
    """Have 16-bit integers added one at a time. LLVM makes pairs of them; where a constant is added
    to a pair and one half of the result is used, ptxas (12.8, 12.9) adds zero instead."""
    from triton.backends.nvidia.compiler import CUDABackend

    backend: Any = CUDABackend
    made = backend.make_ptx
    backend.make_ptx = lambda *args: PAIR.sub(APART, made(*args))


WARM_UP = """
import triton
import triton.language as tl
from tilewright.runtime import tri, tri_rows
from triton.language.extra import libdevice


@triton.jit
def warm_up(p):
    tl.store(p, tl.load(p) + 1)
"""


def warm_up() -> None:
    """Compile something small: forks inherit what the first compilation in a process loads. What
    most kernels import, and the assembler's version for a card, were a fifth of their time."""
    build({"text": WARM_UP, "name": "warm_up", "signature": {"p": "*fp32"}, "constants": {},
           "attributes": {}, "capability": 90, "options": {}})  # fmt: skip


def main() -> None:
    folder = tempfile.mkdtemp(prefix="tilewright-triton-")
    # Triton's own cache lives as long as this process: what is kept is kept by who asked.
    os.environ["TRITON_CACHE_DIR"] = folder
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "0")
    import triton

    version = triton.__version__
    # Triton's key hashes its whole installation, which takes seconds and tells nothing here.
    triton.runtime.cache.triton_key = lambda: version
    try:
        warm_up()
        Server(int(sys.argv[1])).serve()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
