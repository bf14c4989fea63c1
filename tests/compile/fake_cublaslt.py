"""A stand-in for cuBLASLt on memory of the host, and what the real one's headers say."""

from __future__ import annotations

import ctypes
import functools
import re
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tilewright.runtime import cublaslt


@functools.cache
def build(*flags: str) -> str:
    """The library; `-D...` flags rename functions away."""
    folder = tempfile.mkdtemp(prefix="fake-cublaslt-")
    made = f"{folder}/libfakelt.so"
    source = Path(__file__).with_suffix(".cpp")
    subprocess.run(["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-w", *flags, source,
                    "-o", made], check=True)  # fmt: skip
    return made


class Fake:
    """What the stand-in was told."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name in ("fake_preference", "fake_desc", "fake_workspace"):
            self._library[name].restype = ctypes.c_uint64
        library.fake_ld.restype = ctypes.c_int64
        library.fake_workspace_size.restype = ctypes.c_size_t
        self.alive = lambda: int(library.fake_alive())
        self.asked = lambda: int(library.fake_asked())
        self.multiplied = lambda: int(library.fake_multiplied())

    def __getattr__(self, name: str) -> ctypes._NamedFuncPointer:
        return getattr(self._library, f"fake_{name}")


@contextmanager
def fake_cublaslt() -> Iterator[Fake]:
    with cublaslt.use(build()) as made:
        fake = Fake(made.library)
        fake.offer(3)
        fake.splits(0)
        fake.fail(0)
        yield fake


# ---- the real one


def header() -> str | None:
    """The text of cublasLt.h and of what it includes for its types, where CUDA is installed."""
    roots = [Path(sysconfig.get_path("purelib")) / "nvidia", Path("/usr/local/cuda")]
    for root in roots:
        for found in sorted(root.glob("**/include/cublasLt.h")):
            beside = [found.parent / name for name in ("cublas_api.h", "library_types.h")]
            types = [*beside, *root.glob("**/include/library_types.h")]
            return "\n".join(f.read_text() for f in (found, *types) if f.exists())
    return None


def value(text: str, name: str) -> int:
    """A constant of the header; those we use are plain numbers."""
    found = re.search(rf"\b{name}\s*=\s*(0x)?([0-9a-f]+)\b", text)
    assert found is not None, f"{name} is not in the header"
    return int(found[2], 16 if found[1] else 10)


def disagreements(text: str) -> list[str]:
    """Constants of ours that the header gives another value."""
    lt = cublaslt
    ours = {
        "CUDA_R_32F": 0, "CUDA_R_64F": 1, "CUDA_R_16F": 2, "CUDA_R_8I": 3, "CUDA_R_32I": 10,
        "CUDA_R_16BF": 14,
        "CUBLAS_COMPUTE_32F": lt.COMPUTE_32F, "CUBLAS_COMPUTE_64F": lt.COMPUTE_64F,
        "CUBLAS_COMPUTE_32F_FAST_TF32": lt.COMPUTE_32F_FAST_TF32,
        "CUBLAS_COMPUTE_32I": lt.COMPUTE_32I, "CUBLAS_OP_N": 0, "CUBLAS_OP_T": 1,
        "CUBLASLT_EPILOGUE_DEFAULT": lt.EPILOGUE_DEFAULT, "CUBLASLT_EPILOGUE_RELU":
        lt.EPILOGUE_RELU, "CUBLASLT_EPILOGUE_BIAS": lt.EPILOGUE_BIAS,
        "CUBLASLT_EPILOGUE_GELU": lt.EPILOGUE_GELU,
        "CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE": lt.REDUCTION_COMPUTE_TYPE,
        "CUBLASLT_REDUCTION_SCHEME_MASK": lt.REDUCTION_ANY,
        "CUBLASLT_MATMUL_DESC_TRANSA": lt.DESC_TRANSA,
        "CUBLASLT_MATMUL_DESC_TRANSB": lt.DESC_TRANSB,
        "CUBLASLT_MATMUL_DESC_EPILOGUE": lt.DESC_EPILOGUE,
        "CUBLASLT_MATMUL_DESC_BIAS_POINTER": lt.DESC_BIAS,
        "CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE": lt.DESC_BIAS_STEP,
        "CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT": lt.LAYOUT_BATCH,
        "CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET": lt.LAYOUT_STEP,
        "CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES": lt.PREFER_WORKSPACE,
        "CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK": lt.PREFER_REDUCTION,
        "CUBLASLT_ALGO_CONFIG_ID": lt.CONFIG["ALGO"],
        "CUBLASLT_ALGO_CONFIG_TILE_ID": lt.CONFIG["TILE"],
        "CUBLASLT_ALGO_CONFIG_SPLITK_NUM": lt.CONFIG["SPLIT_K"],
        "CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME": lt.CONFIG["REDUCTION"],
        "CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING": lt.CONFIG["SWIZZLE"],
        "CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION": lt.CONFIG["OPTION"],
        "CUBLASLT_ALGO_CONFIG_STAGES_ID": lt.CONFIG["STAGES"],
        "CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID": lt.CONFIG["INNER"],
        "CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID": lt.CONFIG["CLUSTER"],
        "CUBLASLT_CLUSTER_SHAPE_1x1x1": 2, "CUBLASLT_CLUSTER_SHAPE_2x1x1": 3,
        "CUBLASLT_CLUSTER_SHAPE_4x1x1": 4, "CUBLASLT_CLUSTER_SHAPE_1x2x1": 5,
        "CUBLASLT_CLUSTER_SHAPE_2x2x1": 6, "CUBLASLT_CLUSTER_SHAPE_1x4x1": 8,
    }  # fmt: skip
    for letter, ours_ in zip("ABCD", lt.PREFER_ALIGNMENT, strict=True):
        ours[f"CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_{letter}_BYTES"] = ours_
    known = [name for name in ours if not name.startswith("CUDA_R") or "cudaDataType_t;" in text]
    wrong = [f"{n}: {ours[n]}, {value(text, n)} in the header" for n in known
             if value(text, n) != ours[n]]  # fmt: skip
    algo = re.search(
        r"typedef struct \{\s*uint64_t data\[(\d+)\];\s*\} cublasLtMatmulAlgo_t;", text
    )
    if algo is None or int(algo[1]) != 8:
        wrong.append("an algorithm is not 64 bytes")
    return wrong
