"""Thresholds that no model derives, as data: what a card was timed to prefer, and by which program.

`python -m bench.rules` lists all of them, and replays the programs of their evidence on a card,
with and without the rule. A rule without evidence has no figure that names its program and the
alternative; what is known of it stands where the rule is asked. `Target` has the facts of cards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["least", "most", "size"]
NEVER = {"least": 1 << 60, "most": 0}  # limits with which a rule never holds


@dataclass(frozen=True)
class Setting:
    """Where and when something was timed."""

    card: str
    versions: str
    date: str  # when the figure came into this repository


@dataclass(frozen=True)
class Timing:
    """What a rule does for a program: microseconds without it and with it. `instead` is the limit
    it had for the first, where that is not one with which it never holds."""

    program: str  # in the language of `bench.rules`
    before: float
    after: float
    on: Setting
    instead: int | None = None


@dataclass(frozen=True)
class Rule:
    """From a limit on, or up to it, or at just this size, one way is preferred."""

    kind: Kind
    limit: int
    when: str
    prefer: str
    evidence: tuple[Timing, ...] = ()

    def __str__(self) -> str:
        bound = {"least": "at least ", "most": "at most ", "size": ""}[self.kind]
        return f"{bound}{self.limit} {self.when}: {self.prefer}"

    def without(self, timing: Timing) -> int | None:
        """The limit of the time before, if it is known."""
        return NEVER.get(self.kind) if timing.instead is None else timing.instead


def least(limit: int, when: str, prefer: str, *evidence: Timing) -> Rule:
    return Rule("least", limit, when, prefer, evidence)


def most(limit: int, when: str, prefer: str, *evidence: Timing) -> Rule:
    return Rule("most", limit, when, prefer, evidence)


def size(limit: int, when: str, prefer: str, *evidence: Timing) -> Rule:
    return Rule("size", limit, when, prefer, evidence)


H200, TORCH = "H200", "torch 2.11.0+cu130, triton 3.6.0"
NOV_16 = Setting(H200, TORCH, "2026-11-16")
NOV_17 = Setting(H200, TORCH, "2026-11-17")


# ==== what becomes one kernel: the scheduler

# ---- fusion

SHARED_LAUNCH_BYTES = most(
    32 << 20, "bytes of a kernel", "let it share a launch: it takes a few microseconds"
)
PIECES_APART = most(4, "kernels that fill parts of one buffer", "give each a launch")
PIECES_TOGETHER = size(32, "kernels that fill parts of one buffer", "share a launch by so many")
# 4.4 us (H200, 2026-11-15).
SMALL_PIECE = most(
    4 << 20, "bytes such a kernel moves", "share a launch: it takes a fourth of the time of one"
)
MANY_ALIKE = least(8, "kernels from arguments to results", "share launches")
ALIKE_TOGETHER = size(64, "kernels from arguments to results", "share a launch by so many")
ALIKE_BYTES = most(256 << 20, "bytes that each of these moves", "share launches")
ALIKE_TEMPORARY = most(
    1 << 16, "bytes of a temporary that many of these have", "share launches: memory does not grow"
)
# It takes 2 us (H200).
FEW_ALIKE_BYTES = most(8 << 20, "bytes of a kernel that reduces nothing", "share a launch with few")
FEW_ALIKE_TEMPORARY = most(1 << 20, "bytes of a temporary that few of these have", "share a launch")
INTERLEAVED_BYTES = most(
    512,
    "bytes a kernel writes before another one's follow",
    "make them one: each would write parts of all lines",
)
SHARED_PART = most(
    32, "what a kernel moves of what two have in common", "fuse kernels of different loops"
)
ROW_OF_MEMBER = most(
    4096, "iterations a pointwise member has to itself", "fuse it: its values stay near"
)
SHARED_ITERATIONS = least(
    16, "iterations all members share", "fuse members with long loops of their own"
)
SERIAL_ITERATIONS = most(
    64, "iterations a thread runs one after the other beside its row", "fuse them"
)
ROWS_OF_PROGRAM = most(4, "rows that one program has", "fuse what reduces them")

# ---- rows and columns in one kernel

ACCUMULATORS = most(
    1 << 15, "results of a reduction over rows", "accumulate them: more do not stay near"
)
COLUMNS_IN_CACHE = most(
    1 << 18, "bytes of the columns that a CPU's thread has at once", "go along them again"
)
COLUMNS_OF_THREADS = least(
    1 << 16,
    "elements of columns that a CPU's thread would have alone",
    "reduce them by all threads",
)
ORDERED_ROW = least(16, "elements of a row", "run rows one after the other")
ORDERED_SMALL = most(1 << 13, "iterations of all members", "run short rows one after the other too")
CHUNK_ROWS = least(16, "rows of a chunk that leaves a row of results", "split rows into chunks")
ORDERED_CHUNK_ROWS = least(
    8, "rows a program reduces one after the other", "split rows into chunks"
)
LONG_CHUNK_ROWS = least(
    64,
    "rows of a chunk of short rows",
    "split rows into more chunks: what each leaves does not matter",
)
BUSY_ROW = size(
    4096,
    "elements of rows with which two programs keep an SM busy",
    "start more programs of shorter rows",
)
BUSY_MISALIGNED_ROW = size(
    5120, "the same of rows that are not prefetched", "start more programs of shorter rows"
)
LARGE_WORK = least(1 << 17, "iterations", "keep more than a few SMs busy")
WORK_ALONE = most(
    3 << 14,
    "iterations of one program",
    "let it be alone",
    Timing("cross_entropy(bf16(67041, 1001), places(67041, 1001))", 63, 54, NOV_16, 1 << 60),
)
LITTLE_WORK = least(
    64, "what is reduced by what follows of it", "split: no data is read again for it"
)
ROW_ON_CHIP = most(1 << 14, "elements of a row", "keep it on the chip")
COLUMN_TILE = size(64, "columns beside each other of a program", "count programs so")
CHUNK_WORK = least(1 << 14, "iterations of a chunk", "split rows into chunks")
SHARED_ROW_PART = size(1 << 13, "elements of a row for each of its programs", "let several walk it")
CACHED_ROW = most(
    1 << 17, "elements of rows, one for each program", "read them again: they are in cache"
)
MEETING_ROW = most(
    1 << 18,
    "elements of one of few rows",
    "let its programs meet",
    Timing(
        "batch_norm(bf16(32, 64, 128, 128), None, None, training=True)", 117, 76, NOV_17, 1 << 60
    ),
)
READ_TWICE = most(
    3, "what is read of what the cache keeps", "read it twice: some of it is there still"
)
TICKETED_PROGRAMS = most(
    16, "programs of a row that begin after those of another", "let several walk it in turn"
)
TICKETED_FEW_ROWS = most(
    64, "the same of few rows of several buffers", "let several walk it in turn"
)

# ---- splits

CYCLIC_ROWS = least(64, "rows of a chunk", "split rows cyclically: what it leaves is little")
PIECE_ALONE = least(
    480,
    "elements of one of very many pieces of a row",
    "reduce each piece by itself",
    Timing("square(bf16(1070, 69, 1219).float()).sum((0, 2))", 101, 52, NOV_16),
)
# Gelu backwards, 22666x6487 bfloat16: 272 us in 16 chunks, 266 us in 32, 250 us in 64,
# 263 us in 96 (H200).
CYCLIC_STORED_ROWS = least(
    320, "rows of a chunk that stores what it reduces", "split rows cyclically"
)
# 2324x128x479 bfloat16 over 1: squares 93 us in chunks of 16 rows, 182 us in none, before
# SHIFTED_COLUMNS took such tensors. Twice as many rows of moments, which are two values:
# deviations 110 us in chunks of 16, 94 us in none (H200, 2026-11-16).
CYCLIC_NARROW_ROWS = least(
    16, "rows of a chunk where accesses are narrow otherwise", "split rows cyclically"
)
CYCLIC_CHUNKS = most(1024, "chunks", "split rows cyclically: few programs reduce what they leave")
CYCLIC_WORK = least(1 << 14, "iterations of a chunk", "split rows cyclically")
TILED_ROW = most(
    64,
    "elements of an aligned row that is reduced both ways",
    "have several as one tile",
    Timing("(isnan(x := f32(1048576, 40)).sum(0), isnan(x).sum(1))", 153, 91, NOV_17),
)
TILED_ROWS = size(8, "such rows that a program has at once", "have several as one tile")
TILED_PROGRAMS = size(8, "programs of such tiles for each SM", "split rows cyclically by so many")
SHIFTED_COLUMNS = least(
    256,
    "columns beside each other in misaligned rows",
    "reduce whole pieces of rows, shifted in the end",
    Timing("mean(bf16(109, 481, 793), 0)", 33, 26.7, NOV_16),
)
SHIFTED_COLUMNS_PER_SM = least(
    2048,
    "such columns for each SM",
    "reduce whole pieces of rows, shifted in the end",
    Timing("sum(bf16(2324, 128, 479), 1)", 93, 84, NOV_16),
)
BLOCK_CYCLIC = least(
    1 << 22, "elements of which a cache does not keep all", "split blocks cyclically"
)
FINER_ROUNDS = most(4, "rounds for each chunk that is wanted", "make each round a chunk")
SPLIT_WORK = least(
    1 << 17, "iterations of reductions that read memory badly", "cut the loops it runs along"
)
PARTIAL_RESULTS = least(1024, "partial results of a column", "reduce them in chunks too")
RECOMPUTED_SOFTMAX = most(
    48, "additions that a value takes", "compute it again instead of storing it"
)

# ---- order of launches

REVERSED_BYTES = least(
    8 << 20,
    "bytes of a buffer that are touched",
    "run the next kernel back: it finds them in cache",
)
MANY_REDUCTIONS = least(8, "kernels that reduce along memory", "share launches")
REDUCTIONS_TOGETHER = size(64, "kernels that reduce along memory", "share a launch by so many")
REDUCTION_BYTES = most(256 << 20, "bytes that each of these moves", "share launches")
REDUCTION_TEMPORARY = most(1 << 16, "bytes of a temporary that these have", "share launches")
SMALL_REDUCTION = most(
    1 << 20,
    "elements of a reduction",
    "make several one kernel: it takes no longer than to start one",
)
SMALL_REDUCTIONS = most(4, "nests of such a kernel", "make several one kernel")


# ==== how a kernel is written: Triton

# ---- rewrites of loops

READ_ORDER_PIECE = most(
    512,
    "bytes of a piece that is stored in another order than it is read",
    "walk loops in the order of reading",
)
TILE_SIDE = least(8, "points of a loop that memory runs along", "give it an axis of the tile")
REUSED_SOON = most(
    256, "points after which a program reads the same again", "walk loops in the order of reading"
)
REUSED_LATE = least(
    1024, "points after which it does in the order of storing", "walk loops in the order of reading"
)
CHANNELS = most(
    4,
    "points of a loop along which gathers have the same place",
    "make them stores of one point",
    Timing("grid_sample(f32(16, 3, 512, 512), f32(16, 512, 512, 2))", 128, 97, NOV_17),
)
CHANNEL_LOADS = most(32, "elements a point gathers so", "make them stores of one point")
CHANNEL_POINTS = least(1 << 17, "points that are left", "make channels stores of one point")

# ---- the tile

RESIDENT_ROW = most(
    32768, "elements of a row, of all its values alive at once", "keep rows in registers"
)
RESIDENT_ONE_PASS = most(8192, "elements of a row that is read once", "keep rows in registers")
ONE_BLOCK_ROW = most(1 << 13, "elements of a row", "keep it in registers as one block")
REREAD_ROW = most(1 << 15, "twice the elements of a row that is read again", "take it for short")
TILE_COLUMNS = size(16, "columns of the narrowest tile", "waste no more of a line")
RESIDENT_COLUMN = size(64, "rows of columns that are reduced in one pass", "keep them in registers")
EITHER_RESIDENCY = least(1024, "elements of a row", "measure it looped as well as persistent")
ROW_AXIS = least(64, "elements of a row with something in common", "give rows an axis of their own")
SPARSE_ROW_TILE = most(
    256,
    "elements of a tile that is a quarter empty",
    "walk short rows as one",
    Timing("i8(65536, 80) * f32(65536, 1)", 10.0, 6.7, NOV_16),
)
PEELED_ROW = least(2048, "elements of a misaligned row", "peel it: its ends do not matter")
TILE_SIDE_LOOPS = most(
    1024, "elements of a side of a tile", "let it take the loops that memory goes on along"
)
PIPELINED_LOOP = least(
    96 << 10,
    "elements of a row that is read once",
    "have the compiler pipeline its loads",
    Timing("sum(f16(542, 262144), 1)", 69, 65, NOV_16),
)
PIPELINED_AGAIN = least(
    1 << 17, "elements of a row that is read again", "have the compiler pipeline its loads"
)
REPEATED_COST = least(4, "cost of what is computed of a column alone", "compute it once for a tile")

# ---- pointwise configurations

SAMPLES = least(
    8,
    "elements gathered for one",
    "one element for each thread",
    Timing("grid_sample(f32(16, 3, 512, 512), f32(16, 512, 512, 2))", 119, 97, NOV_17),
)
BYTES_OF_THREAD = least(
    160, "bytes a thread would have in flight", "half as many elements for each"
)
LONG_ROW = least(1 << 14, "elements of a row", "one row for each program")
REUSES = least(
    2,
    "times each row of a table is gathered",
    "run programs of the same columns beside each other",
    Timing("(x := f32(256, 150528)) * 0.7 + x[places(256, 256)] * 0.3", 104, 83, NOV_17),
)
REUSED_PIECE = least(
    1024,
    "bytes of a piece where other rows move too",
    "cut rows so that their pieces stay in cache",
)

# ---- configurations of rows and columns

ROW_OF_WARP = most(1024, "elements of a row", "reduce it by one warp")
BYTES_OF_PROGRAM = least(2560, "bytes of the rows of a program", "start as many programs")
PAIRS_TILE = size(
    4096, "elements of a tile of rows that come from the cache", "reduce so many at once"
)
COLUMN_OF_THREAD = most(
    32,
    "rows of a column",
    "reduce it by one thread: so many loads are in flight",
    Timing("sum(bf16(26, 1369912), 0)", 106, 20, NOV_16),
)
SHIFTED_LANES = size(
    512, "columns of a program whose rows are misaligned", "load whole pieces of each row"
)

# ---- split rows

SPLIT_PART = size(
    1 << 13,
    "elements of a row for each of its programs",
    "split it, and let the last program finish",
    Timing(
        "cross_entropy(f32(151, 100277), places(151, 100277), label_smoothing=0.1)",
        24.3,
        20.4,
        NOV_16,
        1 << 20,
    ),
)
SPLIT_PROGRAMS = size(
    9,
    "programs of four warps that an SM runs at once",
    "split rows into so many parts",
    Timing("cross_entropy(bf16(290, 128256), places(290, 128256))", 27.2, 24.1, NOV_16, 18),
)
COOPERATIVE_ROW = least(
    1 << 17,
    "elements of a row that is read again",
    "hold it by several programs",
    Timing("log_softmax(bf16(956, 183232), 1)", 249, 235, NOV_16),
)
COOPERATIVE_PLANES = least(
    1 << 14,
    "elements of such a row in misaligned planes",
    "hold it by several programs",
    Timing("batch_norm(bf16(56, 320, 69, 69), None, None, training=True)", 219, 129, NOV_16),
)
COOPERATIVE_PLANE = least(
    768,
    "elements of a misaligned plane",
    "peel it: its ends do not matter",
    Timing("batch_norm(bf16(256, 256, 31, 31), None, None, training=True)", 169, 113, NOV_16),
)
COOPERATIVE_WARPS = size(8, "warps of a program with a part of a row", "let it hold a part")
COOPERATIVE_PART = size(1 << 14, "sixteen-bit values such a program holds", "let it hold a part")
COOPERATIVE_SMALL_PART = size(
    10 << 10, "sixteen-bit values that half of its warps hold", "halve its warps"
)

# ---- resident rows and columns

CHUNKED_ROW = most(
    40 << 10,
    "sixteen-bit values of a row that is read again",
    "hold it in chunks: two programs fit an SM",
    Timing("softmax(bf16(4000, 20000), 1)", 97, 79, NOV_16),
    Timing("softmax(bf16(7000, 13813), 1)", 113, 97, NOV_16),
)
# Gradient of softmax of 23000, of both rows, 134 us, 115 us walked (H200).
CHUNKED_ROWS = most(
    46 << 10,
    "sixteen-bit values of several rows of which one is made",
    "hold them in chunks",
    Timing("(s := bf16(4211, 22847) + bf16(4211, 22847), rms_norm(s, (22847,)))", 208, 191, NOV_16),
)
# Also RMS norm 113 us, 119 us walked; layer norm of 2300 rows of 24576 135 us, 141 us (H200).
CHUNKED_FLOATS = most(
    64 << 10,
    "twice the floats of a row that is read again",
    "hold it in chunks: one program fits an SM",
    Timing("layer_norm(f32(1711, 32768), (32768,))", 150, 123, NOV_16),
    Timing("softmax(f32(1711, 32768), 1)", 119, 114, NOV_16),
)
CHUNKED_PER_SM = least(4, "rows for each SM", "hold them in chunks")
RECOMPUTED_COST = least(
    20,
    "cost of an operation that would be repeated after each reduction",
    "do not hold rows as they are in memory",
)
RESIDENT_COLUMNS_PER_SM = least(32, "columns for each SM", "hold them as they are in memory")
COLUMN_PIECE = size(32, "rows of a piece of columns of sixteen bits", "hold columns in such pieces")
FLOAT_COLUMN = most(
    3072,
    "rows of columns of floats",
    "hold them in pieces",
    Timing(
        "((x := f32(128, 3000, 80)) - x.mean(1, True)) / x.std(1, keepdim=True)", 142, 106, NOV_17
    ),
)
FLOAT_COLUMNS = size(8, "columns of floats beside each other", "hold them in pieces")
SHORT_ROW = most(
    8192,
    "elements of a row",
    "hold it in narrow tiles, several rows by a warp",
    Timing("cross_entropy(bf16(131072, 1000), places(131072, 1000))", 100, 62, NOV_16),
)
SHORT_ROWS_ELEMENTS = least(1 << 22, "elements of all rows", "hold them in narrow tiles")
SHORT_SPARSE_ROW = most(
    256, "elements of a row whose block would be a quarter empty", "hold it in narrow tiles"
)
SHORT_ROW_TILES = size(8, "tiles of an aligned row", "hold it in so many")
SHORT_ROW_TILE = size(
    32, "elements of a tile: 64 bytes of a row, for four threads", "make tiles no narrower"
)
SHORTEST_ROW_TILE = size(4, "elements of a tile of floats", "use such of the shortest rows")
SHORT_PAIR_TILES = size(
    16, "tiles of a row that is moved two elements at once", "hold it in so many"
)
SHORT_PAIR_TILE = size(16, "elements of such a tile", "make tiles no narrower")
SHORT_PAIRS = most(96, "elements of a row that is moved two at once", "halve its threads")
SHORT_ROW_WARP = size(
    256, "elements of a tile that a warp moves at once", "use such of longer rows"
)
PREFETCHED_ROW = least(
    8256,
    "elements of a row, or of each part of one",
    "prefetch the next block",
    Timing("std_mean(bf16(1610, 61992), 1)", 53.3, 49.5, NOV_16),
)
PREFETCHED_TENSORS = most(2, "tensors read along a row", "prefetch the next block")
PREFETCHED_AGAIN = least(
    40 << 10,
    "elements of a row that is read again",
    "prefetch the next block",
    Timing("log_softmax(bf16(8192, 50257), 1)", 448, 420, NOV_16),
)
PREFETCHED_PER_SM = least(
    8,
    "misaligned rows for each SM that are read again",
    "prefetch the next block",
    Timing("softmax(bf16(2000, 90001), 1)", 231, 225, NOV_16),
)
REMAINDER = least(
    4,
    "what the power of two is of what is left",
    "give what is left a tile of its own",
    Timing("std_mean(bf16(60000, 1088), 1)", 52, 32, NOV_16),
)
REMAINDER_TILE = least(128, "elements of the power of two", "give what is left a tile of its own")
LONGEST_REMAINDER_TILE = most(
    4096, "elements of the power of two", "give what is left a tile of its own"
)

# ---- scans

PRELOADED_MISALIGNED = least(
    6144,
    "bytes of a misaligned row",
    "load all chunks, then scan them",
    Timing("cumsum(bf16(7259, 4959), 1)", 58, 38, NOV_16),
)
PRELOADED_ALIGNED = least(
    8192,
    "elements of an aligned row",
    "load all chunks, then scan them",
    Timing("cumsum(bf16(3000, 12000), 1)", 61, 43, NOV_16),
)
PRELOADED_CHUNKS = most(
    28,
    "chunks for which a warp has registers",
    "load all chunks, then scan them",
    Timing("cumsum(f32(3629, 4959), 1)", 80, 44, NOV_16),
)
PRELOADED_WARPS = size(2, "warps of a row", "let no more wait for each other")
PRELOADED_PER_SM = least(
    16,
    "rows for each SM",
    "load all chunks, then scan them",
    Timing("cumsum(bf16(2571, 14001), 1)", 60, 46, NOV_16),
)
SCAN_PROGRAMS = size(2, "programs that an SM runs at once", "let so many share long rows")
SCAN_PART = size(1 << 13, "elements of a row for each of its programs", "split it")
SCAN_BYTES_PER_SM = least(
    1 << 15,
    "bytes of loads in flight on an SM",
    "scan each column by one thread",
    Timing("cumsum(f16(4425, 128, 128), 1)", 118, 77, NOV_16),
)
SCAN_COLUMNS_PER_SM = most(
    1024,
    "columns on an SM",
    "prefetch the next rows",
    Timing("cumsum(bf16(317, 351, 391), 1)", 102, 89, NOV_16),
)
LOG_SCAN_ROW = most(
    4096,
    "elements of a row whose logarithms are scanned",
    "scan them relative to the largest so far",
)

# ---- misaligned rows, columns and matrices

PEELED_TENSOR = least(
    1 << 16,
    "elements of a tensor that is walked as one row",
    "peel its end",
    Timing("silu(bf16(2313, 54179) + bf16(54179))", 418, 121, NOV_16),
)
PEELED_RESIDENT_ROW = least(768, "elements of a misaligned row in registers", "peel it")
PEELED_GATHERED_ROW = least(512, "elements of a gathered misaligned row", "peel it")
PAIRED_ROW = least(128, "elements of a row of odd length", "move two elements at once")
# Softmax of 85 106 us, 116 us packed (H200).
PAIRED_TILED_ROW = least(64, "elements of such a row in narrow tiles", "move two elements at once")
PAIRED_WEIGHTED_ROW = least(192, "elements of such a row with weights", "move two elements at once")
PAIRED_WEIGHTED_ELEMENTS = least(
    1 << 22, "elements of all such rows with weights", "move two elements at once"
)
LONGEST_PAIRED_ROW = most(4096, "elements of such a row", "move two elements at once")
MISALIGNED_BYTES = most(
    2,
    "bytes of an element of misaligned rows",
    "move sixteen bytes at once: wider ones fill lines as they are",
)
PACKED_ROW = most(
    128,
    "elements of misaligned rows that lie one after the other",
    "move several as one piece",
    Timing("log_softmax(bf16(3000000, 33), 1)", 329, 117, NOV_16),
)
PACKED_ELEMENTS = least(1 << 22, "elements of all such rows", "move several as one piece")
PACKED_BYTES = most(2, "bytes of an element of such rows", "move several as one piece")
SCANNED_MATRIX_ROWS = least(
    64,
    "rows of a matrix of odd rows that are scanned",
    "move rows as one piece",
    Timing("cumsum(bf16(4000, 128, 127), 1)", 126, 69, NOV_16),
)
SCANNED_ROW = least(
    48, "elements of an odd row whose columns are scanned", "move rows as one piece"
)
LONGEST_SCANNED_ROW = most(
    1024, "elements of an odd row whose columns are scanned", "move rows as one piece"
)
SCANNED_MATRICES_PER_SM = least(
    2,
    "such matrices for each SM",
    "move rows as one piece",
    Timing("cumsum(bf16(2000, 96, 203), 1)", 82, 47, NOV_16),
)
MATRIX_ROWS = least(
    32,
    "rows of a misaligned matrix that is reduced",
    "move it as one piece",
    Timing("softmax(bf16(20000, 64, 121), 1)", 247, 183, NOV_16),
)
MATRIX_ELEMENTS = least(2048, "elements of a misaligned matrix", "move it as one piece")
MATRIX_TILE = most(8192, "elements of the tile of a misaligned matrix", "move it as one piece")
MATRICES_PER_SM = least(
    16,
    "such matrices for each SM",
    "move each as one piece",
    Timing("softmax(bf16(40000, 60, 61), 1)", 201, 173, NOV_16),
)
UNROLLED_WARPS = size(
    2,
    "warps of a program of unrolled columns",
    "let a thread have as many columns as it loads at once",
)
UNROLLED_PER_SM = least(
    4,
    "programs of unrolled columns for each SM",
    "unroll columns",
    Timing("argmax(bf16(64, 21, 256, 256), 1)", 61, 53, NOV_16),
)

# ---- moves

TRANSPOSED_ROW = least(
    256,
    "elements that are written of a column",
    "transpose in pieces of sixteen bytes",
    Timing("bf16(8191, 8191).t().contiguous()", 87, 75, NOV_16),
)
TRANSPOSED_BYTES = least(
    1 << 24,
    "bytes of a tensor",
    "move it in pieces of sixteen bytes: smaller ones are in cache",
    Timing("bf16(40, 1001, 803).transpose(1, 2).contiguous()", 44, 36, NOV_16),
)
TRANSPOSED_TILE = size(1 << 15, "bytes of a tile", "let several programs run on an SM")
TRANSPOSED_WHOLE_TILE = size(1 << 16, "bytes of a tile of whole columns", "read it as one piece")
TRANSPOSED_WIDTH = least(
    64,
    "elements of rows that are read",
    "transpose in pieces of sixteen bytes",
    Timing("bf16(506268, 151).t().contiguous()", 96, 84, NOV_16),
)
FEW_ROWS_TILE = most(
    8192,
    "elements of a tile",
    "write columns as one piece",
    Timing("bf16(2306, 47, 725).transpose(1, 2).contiguous()", 99, 85, NOV_16),
)
SHIFTED_PIECE = least(
    4096,
    "elements of the pieces that a tensor is put together of",
    "shift sixteen bytes at once into place",
    Timing(
        "cat((bf16(359, 25, 1747), bf16(359, 25, 1747), bf16(359, 25, 1747)), 2)", 83, 52, NOV_16
    ),
)
SHIFTED_BYTES = least(
    1 << 24, "bytes of a tensor", "shift sixteen bytes at once: smaller ones are in cache"
)
STENCIL_POINTS = least(
    1 << 15,
    "elements that are made of neighbours",
    "make several of them one point",
    Timing("max_pool2d(f32(1, 186880, 16, 16), 3, 2, 1)", 74, 56, NOV_16),
)
STENCIL_NODES = most(4000, "operations of such a point", "make several of them one point")
STENCIL_ROWS = size(2, "rows of windows that have rows in common", "make them one point")
HISTOGRAM_PROGRAMS = size(8, "programs for each SM", "count in shared memory, add once")
HISTOGRAM_WARPS = size(4, "warps of such a program", "count in shared memory, add once")
HISTOGRAM_BLOCK = size(
    4096, "elements that are counted at once", "count in shared memory, add once"
)
LEAST_HISTOGRAM_BLOCK = size(
    1024, "elements that are counted at once of few", "count in shared memory, add once"
)
COMPONENTS = least(
    3, "results that a point stores beside each other", "transpose them through shared memory"
)
MOST_COMPONENTS = most(
    16, "results that a point stores beside each other", "transpose them through shared memory"
)

# ---- tiles as text

SHARED_ROW_PIECE = size(64, "elements of a row that no two programs share", "split rows there")
WELFORD_LANES = size(
    16, "rows of a block across which each has its own mean and deviations", "join them in the end"
)
SOFTMAX_SIDE = size(8, "neighbours of a row that a thread takes as one", "rescale once for them")
SOFTMAX_ROWS = size(4, "rows of a column that a thread takes as one", "rescale once for them")
PEELED_BYTES = most(4, "bytes of an element that two peeled pieces share", "shift between threads")
EARLY_LOADS = most(
    8, "loads whose values a thread has room for", "issue them before the first is used"
)
