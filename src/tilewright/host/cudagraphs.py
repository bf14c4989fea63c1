"""Programs recorded as CUDA graphs and replayed: one launch instead of hundreds.

The first call with given sizes runs plainly, the second is recorded. What arrives at the same
address in both (parameters, what another recording saved) is read in place; everything else is
copied into memory of the recording. A recording's results live in its own memory: while a caller
still holds some of them, another recording takes its turn, and past a few of those (or of sizes)
the program runs plainly. What lives only while a program runs is memory that all recordings of a
device and stream have in common (`support.Turn`); torch's pools are a recording's own, for a result
that somebody holds must not lie where another recording works. `why_not` says which programs cannot
be recorded.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch._ops import OpOverload

from tilewright import metrics
from tilewright.gemm.place import Implementation
from tilewright.graph.user_kernels import Launch
from tilewright.host import support
from tilewright.ir.program import Opaque, Program
from tilewright.runtime import launch
from tilewright.schedule.memory import Step

MOST_SIZES = 16  # sizes of one program that are recorded
MOST_TURNS = 3  # recordings of one size: one is written while results of the others are held
SMALL = 1 << 16  # bytes of a result that is rather copied out than kept by a recording

Call = Callable[[list[Any]], Any]
log = logging.getLogger("tilewright.cudagraphs")


@dataclass(frozen=True)
class Facts:
    """What replaying a program depends on. Arguments are given by their positions."""

    device: int
    mutated: tuple[int, ...]  # arguments it writes to
    numbers: tuple[int, ...] = ()  # arguments that are no tensors
    dynamic: bool = False  # whether tensors come in different sizes
    reason: str = ""  # why it cannot be recorded
    draws: bool = True  # random numbers: torch moves the generator on at every replay


# ---- which programs can be recorded


def facts(program: Program, steps: Sequence[Step]) -> Facts:
    devices = {b.device for step in steps for n in step.group.nodes
               for b in (program.buffers[name] for name in n.reads | n.writes)}  # fmt: skip
    written = {name for step in steps for name in step.group.writes}
    mutated = tuple(k for k, name in enumerate(program.inputs) if name in written)
    numbers = tuple(k for k, name in enumerate(program.inputs) if name not in program.buffers)
    cards = sorted(d.index or 0 for d in devices if d.type == "cuda")
    calls = [step.group.call for step in steps if step.group.call is not None]
    return Facts(cards[0] if cards else 0, mutated, numbers, bool(program.symbols),
                 _why_not(devices, calls), any(map(_draws, calls)))  # fmt: skip


def _why_not(devices: Iterable[torch.device], calls: Sequence[Opaque]) -> str:
    found = set(devices)
    other = sorted(str(d) for d in found if d.type != "cuda")
    if not found or other:
        return f"it works on {', '.join(other) or 'no device'}"
    if len(found) > 1:
        return "it uses several devices"
    return next((reason for reason in map(_unsafe, calls) if reason), "")


def _draws(call: Opaque) -> bool:
    """Whether a call may draw random numbers."""
    if isinstance(call.target, OpOverload):
        return torch.Tag.nondeterministic_seeded in call.target.tags
    return not isinstance(call.target, Launch | Implementation)


def _unsafe(call: Opaque) -> str:
    if call.binds:
        return f"{_name(call.target)} gives the host a number"
    if isinstance(call.target, Launch | Implementation):
        return ""
    if not isinstance(call.target, OpOverload):
        known = getattr(call.target, "__name__", "") == "draw_seeds"
        return "" if known else f"{_name(call.target)} is code we know nothing of"
    tags = call.target.tags
    unsafe = getattr(torch.Tag, "cudagraph_unsafe", None)
    if torch.Tag.dynamic_output_shape in tags or unsafe in tags:
        return f"{_name(call.target)} cannot be recorded"
    return ""


def _name(target: Any) -> str:
    return str(getattr(target, "__name__", target))


# ---- recording and replaying


Cells = tuple[tuple[int, int], ...]  # (address, count) of words that are zero while all is well
Quick = Callable[[list[Any]], Any]  # the results of a replay, None where it does not apply


@dataclass(frozen=True)
class Graph:
    """What was recorded: how to start it on a stream, and the driver's own handle of it, 0 where
    the driver's start is not enough."""

    replay: Callable[[int], None]
    handle: int = 0


class Card(Protocol):
    """What a device does; tests have one that is not there."""

    @property
    def stream(self) -> Callable[[], int]: ...
    @property
    def recording(self) -> Callable[[], bool]: ...
    @property
    def pointers(self) -> Callable[[list[Any]], tuple[int, ...]]: ...
    @property
    def copy(self) -> Callable[[int, int, int, int], None]: ...  # (to, from, bytes, stream)
    def record(self, call: Call, args: list[Any]) -> tuple[Graph, Any]: ...
    def quick(self, graph: Graph, stream: int, recording: Recording,
              cells: Cells) -> Quick | None: ...  # fmt: skip


class _Watched:
    """The memory of a result that is handed out as it is, and its uses while nobody has it."""

    def __init__(self, which: int, result: torch.Tensor) -> None:
        self.which = which
        self.storage = result.untyped_storage()  # a use of its own, counted below
        self.address: int = self.storage._cdata
        self.uses = _use_count(self.address)


_use_count: Callable[[int], int] = torch._C._storage_Use_Count


@dataclass
class Recording:
    """A graph, the addresses it reads in place, what is copied in, and its results."""

    graph: Graph
    fixed: tuple[int, ...]  # arguments
    addresses: Any  # theirs, as `where` finds them among all
    where: Callable[[Sequence[int]], Any]
    copies: tuple[tuple[int, torch.Tensor, int], ...]  # (argument, memory, bytes)
    results: list[Any]
    back: tuple[tuple[int, torch.Tensor, int], ...]  # copies to return: the program writes to them
    copied_out: frozenset[int] = frozenset()
    watched: tuple[_Watched, ...] = ()
    scratch: torch.Tensor | None = None  # kept for as long as this is
    quick: Quick | None = None  # all of a replay in one call

    def fits(self, addresses: Sequence[int]) -> bool:
        return self.where(addresses) == self.addresses

    def held(self) -> list[int]:
        """The results somebody still has, of those that are handed out as they are."""
        return [w.which for w in self.watched if _use_count(w.address) > w.uses]


@dataclass
class _Size:
    """The calls with one set of sizes."""

    before: tuple[int, ...]  # addresses at the call before
    recordings: list[Recording] = field(default_factory=list[Recording])
    moving: set[int] = field(default_factory=set[int])  # arguments that have been seen to move
    copied_out: set[int] = field(default_factory=set[int])  # small results that callers keep


class Replayed:
    """A program that is recorded at its second call with the same sizes."""

    def __init__(self, call: Call, found: Facts, card: Card) -> None:
        self.call = call
        self.facts = found
        self.card = card
        self.sizes: dict[Any, _Size] = {}
        self.stopped = ""
        self.flags: tuple[support.DeviceFlag, ...] = getattr(call, "flags", ())
        self.quick: Quick | None = None  # of the recording that was replayed last
        self.scratch = 0  # bytes that a plain call worked in
        self.pure: bool = getattr(call, "pure", False)
        self._boxed_call = True

    def __call__(self, args: list[Any]) -> Any:
        if self.quick is not None:
            results = self.quick(args)
            if results is not None:
                return results
        with launch.turns():
            results = self._take_turn(args)
        return self._plainly(args) if results is None else results

    def _plainly(self, args: list[Any]) -> Any:
        before = support.turn.used
        results = self.call(args)
        self.scratch = max(self.scratch, support.turn.used - before)
        return results

    def _take_turn(self, args: list[Any]) -> Any:
        """The results of a recording; None if the program has to run plainly."""
        card = self.card
        if self.stopped or card.recording():
            return None
        stream = card.stream()
        key = self._key(stream, args)
        addresses = card.pointers(args)
        size = self.sizes.get(key)
        if size is None:
            return self._first(key, addresses)
        for recording in size.recordings:
            if recording.fits(addresses) and not recording.held():
                return self._replay(recording, args, addresses, stream)
        return self._record(size, args, addresses, stream)

    def _key(self, stream: int, args: list[Any]) -> Any:
        found = self.facts
        if found.dynamic:
            return (stream, *(_shape(a) for a in args))
        return (stream, *(args[k] for k in found.numbers)) if found.numbers else stream

    def _first(self, key: Any, addresses: tuple[int, ...]) -> None:
        if len(self.sizes) < MOST_SIZES:
            self.sizes[key] = _Size(addresses)
        else:
            _count("more sizes than are recorded")

    # ---- replay

    def _replay(self, recording: Recording, args: list[Any], addresses: Sequence[int],
                stream: int) -> Any:  # fmt: skip
        card = self.card
        for flag in self.flags:
            flag.check()
        for k, memory, count in recording.copies:
            card.copy(memory.data_ptr(), addresses[k], count, stream)
        recording.graph.replay(stream)
        for k, memory, count in recording.back:
            card.copy(addresses[k], memory.data_ptr(), count, stream)
        results = tuple(_handed_out(r, k in recording.copied_out, args)
                        for k, r in enumerate(recording.results))  # fmt: skip
        args.clear()
        self.quick = recording.quick
        return results

    # ---- record

    def _record(self, size: _Size, args: list[Any], addresses: tuple[int, ...], stream: int) -> Any:
        self.quick = None  # it holds nothing of its recording, which may have to go
        self._copy_small_ones_out(size, addresses)
        size.moving |= {k for k, (a, b) in enumerate(zip(size.before, addresses, strict=True))
                        if a != b}  # fmt: skip
        size.before = addresses
        if len(size.recordings) >= MOST_TURNS:
            stale = [r for r in size.recordings if any(k in size.moving for k in r.fixed)]
            if not stale:
                _count("results of all recordings are held")
                return None
            size.recordings.remove(stale[0])  # its fixed arguments move after all
        try:
            recording = self._recorded(args, addresses, size, stream)
        except RuntimeError as error:  # an operation the driver does not let us record
            self.stop(f"recording failed: {str(error).splitlines()[0]}")
            return None
        size.recordings.append(recording)
        return self._replay(recording, args, addresses, stream)

    def _copy_small_ones_out(self, size: _Size, addresses: tuple[int, ...]) -> None:
        """Small results that callers keep (a loss) are copied out of the next recording, which
        takes the place of this one: two would cost memory for all that the backward pass needs."""
        for recording in list(size.recordings):
            held = recording.held() if recording.fits(addresses) else []
            if held and all(recording.results[k].nbytes <= SMALL for k in held):
                size.copied_out.update(held)
                size.recordings.remove(recording)

    def _recorded(self, args: list[Any], addresses: tuple[int, ...], size: _Size, stream: int
                  ) -> Recording:  # fmt: skip
        given = list(args)
        copies: list[tuple[int, torch.Tensor, int]] = []
        fixed: list[int] = []
        for k, arg in enumerate(args):
            if not isinstance(arg, torch.Tensor):
                continue
            if k not in size.moving:
                fixed.append(k)
                continue
            span = _span(arg)
            memory = torch.empty_strided((span,), (1,), dtype=arg.dtype, device=arg.device)
            given[k] = torch.as_strided(memory, arg.size(), arg.stride())
            copies.append((k, memory, span * arg.element_size()))
        for k, memory, count in copies:
            self.card.copy(memory.data_ptr(), addresses[k], count, stream)
        scratch = _scratch(self.facts.device, stream, self.scratch, given)
        with support.turn.recorded(stream, scratch):
            graph, results = self.card.record(self.call, given)
        own = {m.untyped_storage().data_ptr(): k for k, m, _ in copies}
        kept = [_of_argument(r, own) for r in results]
        back = tuple(c for c in copies if c[0] in self.facts.mutated)
        where = operator.itemgetter(*fixed) if fixed else _nowhere
        recording = Recording(graph, tuple(fixed), where(addresses), where, tuple(copies), kept,
                              back, scratch=scratch)  # fmt: skip
        mine = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        recording.copied_out = frozenset(size.copied_out)
        recording.watched = tuple(_Watched(k, r) for k, r in enumerate(kept)
                                  if k not in size.copied_out and _is_own(r, mine))  # fmt: skip
        if not (self.facts.dynamic or self.facts.numbers):
            cells = tuple(flag.place for flag in self.flags)
            recording.quick = self.card.quick(graph, stream, recording, cells)
        _count("recorded")
        return recording

    def stop(self, reason: str) -> None:
        self.stopped = reason
        self.quick = None
        self.sizes.clear()
        _skipped(reason)


def _nowhere(addresses: Sequence[int]) -> None:
    return None


def _count(what: str) -> None:
    metrics.counters["cudagraphs"][what] += 1


def _skipped(reason: str) -> None:
    _count(f"skipped: {reason}")
    log.info("a program is not recorded as a CUDA graph: %s", reason)


def _shape(arg: Any) -> Any:
    """What a recording depends on: a number itself, or a tensor's layout."""
    return (arg.size(), arg.stride()) if isinstance(arg, torch.Tensor) else arg


def _span(t: torch.Tensor) -> int:
    """Elements from the first to the last in memory."""
    if t.numel() == 0:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(t.size(), t.stride(), strict=True))


def _is_own(result: Any, arguments: set[int]) -> bool:
    """Whether a result is memory of the recording, which callers may hold."""
    return (isinstance(result, torch.Tensor) and result.numel() > 0
            and result.untyped_storage().data_ptr() not in arguments)  # fmt: skip


@dataclass(frozen=True)
class _Argument:
    """A result that is (a view of) an argument which is copied in: the caller gets his own."""

    which: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # from the argument's first element

    def of(self, args: Sequence[Any]) -> torch.Tensor:
        given: torch.Tensor = args[self.which]
        if (given.size(), given.stride(), 0) == (self.size, self.stride, self.offset):
            return given
        return given.as_strided(self.size, self.stride, given.storage_offset() + self.offset)


def _of_argument(result: Any, own: Mapping[int, int]) -> Any:
    """`own`: the memory that arguments are copied to -> their positions."""
    if not isinstance(result, torch.Tensor):
        return result
    which = own.get(result.untyped_storage().data_ptr())
    if which is None:
        return result
    return _Argument(which, tuple(result.size()), result.stride(), int(result.storage_offset()))


_window: Callable[..., torch.Tensor] = vars(support)["window"]


def _handed_out(result: Any, copied: bool, args: Sequence[Any]) -> Any:
    """A tensor of its own over the recording's memory, or over a copy."""
    if isinstance(result, _Argument):
        return result.of(args)
    if not isinstance(result, torch.Tensor):
        return result
    return result.clone() if copied else _window(result, result.size(), result.stride(), 0)


def quick_replay(make: Callable[..., Quick], graph: int, of_stream: tuple[Any, int, int],
                 recording: Recording, cells: Cells) -> Quick:  # fmt: skip
    """A recording as the extension replays it (`Replay` in `runtime/launch.cpp`)."""
    fixed = recording.fixed
    expected = recording.addresses if len(fixed) > 1 else (recording.addresses,)
    return make(
        graph,
        of_stream,
        (_use_count, tuple((w.address, w.uses) for w in recording.watched)),
        (
            tuple(zip(fixed, expected, strict=False)),
            tuple((k, memory.data_ptr(), count) for k, memory, count in recording.copies),
            tuple((k, memory.data_ptr(), count) for k, memory, count in recording.back),
            cells,
        ),
        tuple(_handing_out(r, k in recording.copied_out) for k, r in enumerate(recording.results)),
    )


def _handing_out(result: Any, copied: bool) -> tuple[Any, Any]:
    """`_handed_out` as a function and its arguments: None for the arguments of the program; a
    result without a function is handed out as it is."""
    if isinstance(result, _Argument):
        return result.of, None
    if not isinstance(result, torch.Tensor):
        return None, result
    if copied:
        return torch.clone, (result,)
    return _window, (result, tuple(result.size()), result.stride(), 0)


# ---- the card itself


class Cuda:
    """A real card."""

    def __init__(self, device: int, draws: bool) -> None:
        self.device = device
        self.draws = draws
        self.pointers = launch.pointer_reader()
        self.copy = launch.copier()
        self.stream = functools.partial(torch._C._cuda_getCurrentRawStream, device)
        self.recording = torch.cuda.is_current_stream_capturing

    def quick(self, graph: Graph, stream: int, recording: Recording,
              cells: Cells) -> Quick | None:  # fmt: skip
        make = launch.replayer()
        if make is None or not graph.handle:
            return None
        of_stream = (torch._C._cuda_getCurrentRawStream, self.device, stream)
        return quick_replay(make, graph.handle, of_stream, recording, cells)

    def record(self, call: Call, args: list[Any]) -> tuple[Graph, Any]:
        main = torch.cuda.current_stream(self.device)
        side = _side_stream(self.device, main.cuda_stream)
        side.wait_stream(main)
        torch.cuda.synchronize(self.device)
        with torch.cuda.device(self.device), torch.cuda.stream(side):
            pool = torch.cuda.graph_pool_handle()
            graph, results = _captured(lambda: call(args), pool, self.device)
        main.wait_stream(side)
        return self._graph(graph), results

    def _graph(self, graph: torch.cuda.CUDAGraph) -> Graph:
        """The driver's launch of the graph, where torch need not do anything beside it."""
        start = launch.graph_starter()
        handle = getattr(graph, "raw_cuda_graph_exec", None)
        if self.draws or start is None or handle is None:
            return Graph(lambda stream: graph.replay())
        address: int = handle()

        def replay(stream: int) -> None:
            if start(address, stream):  # a thread new to CUDA; an error is torch's to report
                graph.replay()

        return Graph(replay, address)


def _captured(run: Callable[[], Any], pool: Any, device: int) -> tuple[torch.cuda.CUDAGraph, Any]:
    """What `run` launches on the current stream, as a graph. A failure leaves nothing behind."""
    graph = torch.cuda.CUDAGraph()
    try:
        graph.capture_begin(pool, "thread_local")
        results = run()
        graph.capture_end()
    except BaseException:
        _abandon(graph, pool, device)
        raise
    return graph, results


def _abandon(graph: torch.cuda.CUDAGraph, pool: Any, device: int) -> None:
    """End a capture that failed: the stream, the allocator and the generator are as before."""
    for undo in (graph.capture_end, lambda: torch._C._cuda_endAllocateToPool(device, pool)):
        with contextlib.suppress(RuntimeError, AttributeError):
            undo()
    generator = torch.cuda.default_generators[device]
    with contextlib.suppress(RuntimeError):
        generator.graphsafe_set_state(generator.clone_state())  # a copy is not capturing


_streams: dict[tuple[int, int], torch.cuda.Stream] = {}
_scratches: weakref.WeakValueDictionary[tuple[int, int], torch.Tensor] = (
    weakref.WeakValueDictionary())  # fmt: skip


def _side_stream(device: int, stream: int) -> torch.cuda.Stream:
    """The stream on which all recordings for a stream are made: libraries have a workspace for each
    stream, so recordings that run at the same time must not come from one."""
    if (device, stream) not in _streams:
        _streams[device, stream] = torch.cuda.Stream(device)
    return _streams[device, stream]


def _scratch(device: int, stream: int, count: int, args: Sequence[Any]) -> torch.Tensor | None:
    """So many bytes that recordings for a stream work in, one after the other."""
    if not count:
        return None
    found = _scratches.get((device, stream))
    if found is None or found.numel() < count:
        more = 0 if found is None else found.numel() * 3 // 2  # so that few are outgrown
        place = next((a.device for a in args if isinstance(a, torch.Tensor)), None)
        found = torch.empty(max(count, more), dtype=torch.uint8,
                            device=place or torch.device("cuda", device))  # fmt: skip
        _scratches[device, stream] = found
    return found


def replayed(call: Call, found: Facts | None) -> Call:
    """The program, recorded and replayed where that can be done."""
    if found is None:
        return call
    if found.reason:
        _skipped(found.reason)
        return call
    return Replayed(call, found, Cuda(found.device, found.draws))
