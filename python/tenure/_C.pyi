"""The extension: libtenure as Python sees it. Private; use the functions of `tenure`."""

import builtins
import contextvars
from collections.abc import Callable
from types import CodeType, TracebackType
from typing import Any, Literal, Self, overload

import numpy as np
import numpy.typing as npt
import torch

# errors: none here, see tenure.errors

# clock
class Subscription:
    """Keeps a function called at each step; ends with this object."""

    def end(self) -> None:
        """Ends it now."""

def step_now() -> int: ...
def tick_explicit(who: int, number: int | None) -> bool: ...
def leave_clock(who: int) -> None: ...
def tick_implicit(who: int) -> bool: ...
def on_step(fn: Callable[[int], None]) -> Subscription: ...

# scopes
class ScopeReport:
    """What was still leased when a scope closed. False if nothing was."""

    @property
    def scope(self) -> str: ...
    @property
    def leases(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def raises(self) -> bool: ...
    @property
    def released(self) -> bool: ...
    @property
    def owners(self) -> list[str]: ...
    def __bool__(self) -> bool: ...

def set_scope_variable(variable: contextvars.ContextVar[Any]) -> None: ...

class ScopeBase:
    """What :class:`tenure.Scope` has in C++: the calls that open and close it."""

    def __init__(self) -> None: ...
    @property
    def _id(self) -> int | None: ...
    @property
    def is_open(self) -> bool:
        """Whether leases can be taken in it."""
    def _close(self) -> ScopeReport | None: ...
    def __enter__(self) -> Self:
        """Opens it inside the current scope."""
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes it. When an exception ends it, nothing is raised or warned about on top.

        Scopes that were opened inside it and are still open end with it then, innermost first;
        those of other threads and tasks move to the scope around it. Where it cannot be closed, the
        exception gets a note that says why.
        """

def tell_clock(name: str, count: int | None) -> None: ...
def tell_clock_while_raising(name: str, count: int | None) -> None: ...
def current_scope() -> int: ...
def scope_path(id: int) -> str: ...
def fork_generation() -> int: ...

# storage
class StorageRef:
    """The identity of a storage, without keeping its data alive.

    Equal references name the same storage, whatever the allocator does with addresses; a reference
    to a dead storage equals no other storage's.
    """

    @overload
    def __init__(self, tensor: torch.Tensor) -> None: ...
    @overload
    def __init__(self, storage: torch.UntypedStorage) -> None: ...
    @property
    def alive(self) -> bool:
        """Whether anyone still holds the storage."""

    @property
    def nbytes(self) -> int:
        """Its size; 0 once it is dead."""

    @property
    def device(self) -> torch.device:
        """Where it is, or was."""

    def lock(self) -> torch.UntypedStorage | None:
        """The storage, or None once it is dead."""

    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...
    def __copy__(self) -> Self: ...
    def __deepcopy__(self, memo: dict[int, Any]) -> Self: ...

class Fence:
    """A point in a device's work: ready when all that was queued before it is done.

    On the CPU a fence is ready at once.
    """

    def __init__(self) -> None: ...
    @overload
    @staticmethod
    def record(stream: torch.Stream) -> Fence:
        """On that stream."""

    @overload
    @staticmethod
    def record(device: torch.device) -> Fence:
        """On the current stream of that device."""

    def ready(self) -> bool:
        """Whether the work is done."""

    @overload
    def wait(self) -> None:
        """This thread waits, without holding the GIL."""

    @overload
    def wait(self, stream: torch.Stream) -> None:
        """Work queued on the stream from now on waits; this thread does not."""

class Explanation:
    """Who holds a storage. Print it, or read its fields."""

    @property
    def storage(self) -> StorageRef: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def references(self) -> int:
        """All strong references to the storage, whoever has them."""

    @property
    def others(self) -> int:
        """References that no lease explains."""

    @property
    def leases(self) -> list[LeaseInfo]:
        """Tenure's leases on it, oldest first."""

    @property
    def held_by(self) -> list[str]:
        """What other parts of Tenure say of it."""

    @property
    def released(self) -> str | None:
        """The text that a reader gets, if its data is gone."""

def explain(tensor: torch.Tensor) -> Explanation: ...
def release_storage(tensor: torch.Tensor, by: str, site: str, fence: Fence) -> None: ...
def refill_storage(tensor: torch.Tensor, source: torch.Tensor | None) -> None: ...
def released_text(storage: torch.UntypedStorage) -> str | None: ...
def is_released(tensor: torch.Tensor) -> bool: ...

# leases
class LeaseInfo:
    """One lease as it was when asked."""

    @property
    def nbytes(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def owner(self) -> str: ...
    @property
    def site(self) -> str: ...
    @property
    def scope(self) -> str: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def age(self) -> float: ...

class Lease:
    """Keeps a tensor's storage alive until it is released, its scope ends, or it goes.

    Made by :func:`tenure.hold`; a `with` block releases it at its end.
    """

    @property
    def nbytes(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def owner(self) -> str: ...
    @property
    def site(self) -> str: ...
    @property
    def scope(self) -> str: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def age(self) -> float: ...
    @property
    def held(self) -> bool:
        """Whether it still keeps the storage alive."""

    def release(self, after: Fence | None = None) -> None:
        """Lets the storage go, now or when the fence is ready. LeaseError the second time."""

    def transfer(self, scope: ScopeBase | None) -> None:
        """Moves it to another open scope; None is the process."""

    def storage(self) -> torch.UntypedStorage:
        """The storage that it holds."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

def hold(tensor: torch.Tensor, kind: str, name: str, site: str, scope: int | None) -> Lease: ...

# ledger
class Totals:
    """Bytes and leases. A storage counts once in `bytes`, however many leases hold it."""

    @property
    def bytes(self) -> int: ...
    @property
    def leases(self) -> int: ...
    @property
    def peak(self) -> int:
        """Most bytes since the interval began."""

class KindTotals:
    """Totals of everything and of each kind of owner."""

    @property
    def all(self) -> Totals: ...
    @property
    def by_kind(self) -> dict[str, Totals]: ...

class Snapshot:
    """All leases at one moment, as columns."""

    def __len__(self) -> int: ...
    @property
    def storage(self) -> npt.NDArray[np.uint64]: ...
    @property
    def bytes(self) -> npt.NDArray[np.uint64]: ...
    @property
    def scope(self) -> npt.NDArray[np.uint64]: ...
    @property
    def owner(self) -> npt.NDArray[np.uint32]: ...
    @property
    def device(self) -> npt.NDArray[np.uint16]: ...
    @property
    def age(self) -> npt.NDArray[np.float64]: ...
    def by_owner(self) -> list[tuple[int, Totals]]: ...
    def by_scope(self) -> list[tuple[str, Totals]]: ...
    def bytes_once(self) -> int: ...

def snapshot() -> Snapshot: ...
def totals() -> KindTotals: ...
def start_interval() -> KindTotals: ...
def owner_of(id: int) -> tuple[str, str, str]: ...
def owner_kinds() -> list[str]: ...
def device_from_tag(tag: int) -> str: ...

# samples, in bytes
class CgroupSample:
    """The memory control group of the process."""

    @property
    def usage(self) -> int:
        """Charged to the group, cached files included."""

    @property
    def limit(self) -> int | None:
        """The tightest limit from the group upwards; None: no limit."""

    @property
    def headroom(self) -> int | None:
        """What is left under the limit that is met first."""

class MappedSample:
    """A walk over all mappings of the process."""

    @property
    def pss(self) -> int:
        """Pages shared with n processes count 1/n."""

    @property
    def pss_file(self) -> int | None:
        """The part of `pss` that is files: it falls when another process that maps them starts."""

    @property
    def rss(self) -> int:
        """Exact, unlike `ProcessSample.rss` on older kernels."""

    @property
    def cgroup_inactive_file(self) -> int | None:
        """Cached files of the group that the kernel drops first."""

    @property
    def cgroup_files_in_memory(self) -> int | None:
        """Of the group, less what the process maps itself: files in /dev/shm, say."""

    @property
    def age(self) -> float:
        """Seconds since the walk began."""

class ProcessSample:
    """What the system says of this process."""

    @property
    def rss(self) -> int:
        """Resident."""

    @property
    def virtual_size(self) -> int:
        """Mapped, resident or not."""

    @property
    def virtual_limit(self) -> int | None:
        """Of that: ulimit -v. None: no limit."""

    @property
    def data(self) -> int | None:
        """Private and writable, resident or not."""

    @property
    def data_limit(self) -> int | None:
        """Of that: ulimit -d. None: no limit."""

    @property
    def peak_rss(self) -> int | None:
        """Most resident since the program began."""

    @property
    def shared(self) -> int | None:
        """Resident shared memory: memfd, /dev/shm, tmpfs."""

    @property
    def files(self) -> int | None:
        """Resident pages of files, which the kernel may drop."""

    @property
    def swap(self) -> int | None:
        """Swapped out."""

    @property
    def host_total(self) -> int | None:
        """Memory of the machine."""

    @property
    def host_available(self) -> int | None:
        """What new programs could take."""

    @property
    def cgroup(self) -> CgroupSample | None:
        """None where none accounts for the process."""

    @property
    def mapped(self) -> MappedSample | None:
        """None unless something refreshes samples."""

class Gauge:
    """A figure and its highest value."""

    @property
    def current(self) -> int:
        """Now."""

    @property
    def peak(self) -> int:
        """Since the allocator's statistics were last reset, by whomever."""

class AllocatorSample:
    """A device's caching allocator."""

    @property
    def allocated(self) -> Gauge:
        """In tensors."""

    @property
    def active(self) -> Gauge:
        """Allocated, or freed but still in use by a stream."""

    @property
    def inactive(self) -> Gauge:
        """The free remainder of split blocks."""

    @property
    def reserved(self) -> Gauge:
        """Taken from the driver."""

    @property
    def retries(self) -> int:
        """Allocations that first emptied the cache."""

    @property
    def ooms(self) -> int:
        """Out-of-memory errors."""

class DriverSample:
    """A device as its driver sees it."""

    @property
    def free(self) -> int:
        """Free for any process."""

    @property
    def total(self) -> int:
        """Of the device."""

class PinnedSample:
    """Page-locked host memory."""

    @property
    def active(self) -> int:
        """In tensors, or still in use by a stream."""

    @property
    def reserved(self) -> Gauge:
        """Taken from the system, cache included."""

class DeviceSample:
    """A device on which this process has a context."""

    @property
    def device(self) -> torch.device: ...
    @property
    def allocator(self) -> AllocatorSample | None:
        """None where the allocator does not say."""

    @property
    def driver(self) -> DriverSample | None:
        """None where the driver does not say."""

class Sample:
    """One reading of process, pinned memory and devices."""

    @property
    def process(self) -> ProcessSample: ...
    @property
    def pinned(self) -> PinnedSample | None:
        """None without an initialised accelerator."""

    @property
    def devices(self) -> list[DeviceSample]:
        """One for each device that the program has used."""

class SampleRefresh:
    """While it lives, samples have a `ProcessSample.mapped`."""

    def __init__(self, period: float = 1.0) -> None: ...
    def stop(self) -> None:
        """Ends it. A second call does nothing."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

def sample() -> Sample: ...
def bytes_text(size: int) -> str: ...

# inspect
def install_frames(torch: str, library: list[str], module_call: CodeType) -> None: ...
def can_record() -> bool: ...
def origin(id: int) -> dict[str, Any]: ...

_Evidence = tuple[set[int], set[int], dict[int, tuple[float, int, int]]]  # as evidence.Given

def judge(
    rows: list[dict[str, Any]],
    cuts: dict[int, list[tuple[int, int, int, int]]],
    steps: bool,
    evidence: _Evidence,
) -> dict[str, Any]: ...
def judge_files(
    cases: list[tuple[str, bool, _Evidence]],
    threads: int,
) -> list[dict[str, Any] | str]:
    """Of recordings: path, whether rows are steps, evidence. A text says what is wrong."""

def origin_of(tensor: torch.Tensor) -> int | None: ...
def alive_of(origins: set[int]) -> list[tuple[int, int, int, int]]:
    """Storages alive of these origins: address, id, bytes, step."""

def any_tensor() -> bool: ...
def welcome_shared(storage: torch.UntypedStorage) -> None: ...
def welcome_wrapped(tensor: torch.Tensor) -> None: ...
def watch_arenas() -> None: ...
def unwatch_arenas() -> None: ...
def alive_storages() -> list[tuple[int, int]]: ...
def held_bytes() -> int: ...
def observer_bytes() -> int: ...
def device_born(address: int, bytes: int, index: int, site: str) -> None: ...
def device_died(address: int, bytes: int) -> None: ...
def see_devices() -> None: ...
def observed_level() -> str: ...
def step_down(level: str) -> None: ...
def welcome(storage: torch.UntypedStorage) -> bool: ...
def unnamed_modules() -> list[tuple[int, int]]: ...
def name_module(number: int, name: str) -> None: ...
def forget_module(address: int) -> None: ...
def call_on_main_thread(call: Callable[[], None]) -> None: ...

class Redactor:
    """Hashes names in a text; without a key it leaves it as it is."""

    @overload
    def __init__(self) -> None: ...
    @overload
    def __init__(self, key: str, known: list[str]) -> None: ...
    def __call__(self, text: str) -> str: ...

class Watch:
    """One session of watching this process."""

    def __init__(
        self, level: str, path: str, cap: int, meta: list[tuple[str, str]], redact: Redactor
    ) -> None: ...
    def end_interval(self, number: int) -> bool: ...
    def step_up(self, level: str, cap: int) -> None: ...
    def due(self) -> bool: ...
    def judge(self) -> dict[str, Any]: ...
    def rows(self) -> list[dict[str, Any]]: ...
    def cuts(self) -> dict[int, list[tuple[int, int, int, int]]]: ...
    def add_holding(
        self,
        step: int,
        origin: int,
        bytes_per_step: float,
        bytes: int,
        count: int,
        path: str,
    ) -> None: ...
    def mark(self, tensors: list[tuple[torch.Tensor, str, str]]) -> None: ...
    def set_evidence(self, evidence: _Evidence) -> None: ...
    def note(self, kind: str, text: str) -> None: ...
    def put(self, key: str, value: str) -> None: ...
    def spend(self, seconds: float) -> None: ...
    def cost(self) -> float: ...
    def broken(self) -> str: ...

def instances(kinds: list[type]) -> list[Any]: ...
def users_of_leaves(leaves: list[torch.Tensor]) -> list[int]: ...
def nodes_made() -> int: ...
def gradients(tensors: list[torch.Tensor], engine: str) -> list[torch.Tensor | None] | None: ...
def storage_bytes(tensor: torch.Tensor) -> int | None: ...

class References:
    """Who refers to whom in this process when it is entered; all of it lives until it is left."""

    def __init__(self, skip: list[Any], late: list[str] = ...) -> None: ...
    def __enter__(self) -> References: ...
    def enter_at_rest(self, seconds: float, engine: str, library: str) -> bool: ...
    def __exit__(self, *_: object) -> None: ...
    @property
    def size(self) -> int: ...
    @property
    def references(self) -> int: ...
    def storages(self) -> list[tuple[int, int, int, bool, int]]:
        """Address of the memory, bytes, node, whether a root reaches it, its own address."""

    def bytes_by_device(self) -> dict[str, int]: ...
    def adopt(self) -> int: ...
    def find_foreign(self) -> None: ...
    def unseen(self, node: int) -> int: ...
    def counts(self, node: int) -> tuple[int, int]: ...
    def retention(
        self, node: int
    ) -> tuple[bool, list[tuple[str, Any, str, str]], list[tuple[str, Any, str, str]], bool]: ...
    def way(self, node: int) -> list[int]: ...
    def element(self, node: int, next: int) -> tuple[str, Any, str, str]: ...
    def labels_behind(self, node: int, nodes: list[int], labels: list[int]) -> list[int]: ...
    def gone_with(self, node: int) -> list[int]: ...
    def goes_with_reference(self, node: int) -> list[bool]: ...
    def users_of(self, leaf: torch.Tensor) -> list[tuple[int, int]]: ...
    def autograd_nodes(self) -> int: ...
    def cycles(self, most: int) -> list[tuple[list[tuple[str, Any, str, str]], int, bool]]: ...
    def by_beginning(self) -> list[tuple[int, int, int]]:
        """Bytes, count, node of one of them."""

    def referring_to(self, node: int) -> list[int]: ...
    def heads_of(self, node: int) -> list[list[int]]: ...
    def node_of(self, tensor: torch.Tensor) -> int | None: ...

# offload
class OffloadStats:
    """What offloading did in the last whole step. ``print`` it."""

    @property
    def steps(self) -> int: ...
    @property
    def mode(self) -> str: ...
    @property
    def saved_bytes(self) -> int: ...
    @property
    def saved_storages(self) -> int: ...
    @property
    def moved_out_bytes(self) -> int: ...
    @property
    def moved_out_storages(self) -> int: ...
    @property
    def moved_in_bytes(self) -> int: ...
    @property
    def moved_in_storages(self) -> int: ...
    @property
    def reused_bytes(self) -> int: ...
    @property
    def dropped_bytes(self) -> int: ...
    @property
    def dropped_storages(self) -> int: ...
    @property
    def remade_bytes(self) -> int: ...
    @property
    def remade_calls(self) -> int: ...
    @property
    def audited(self) -> int: ...
    @property
    def diverged(self) -> str: ...
    @property
    def kept(self) -> dict[str, tuple[int, int]]: ...
    @property
    def kept_bytes(self) -> int: ...
    @property
    def host_bytes(self) -> int: ...
    @property
    def most_host_bytes(self) -> int: ...
    @property
    def pinned_bytes(self) -> int: ...
    @property
    def slabs_taken(self) -> int: ...
    @property
    def disk_bytes(self) -> int: ...
    @property
    def file_bytes(self) -> int: ...
    @property
    def tracked(self) -> int: ...
    @property
    def exposed_seconds(self) -> float: ...
    @property
    def out_bandwidth(self) -> float: ...
    @property
    def in_bandwidth(self) -> float: ...
    @property
    def peak(self) -> int: ...
    @property
    def promised(self) -> int: ...
    @property
    def least(self) -> int: ...
    @property
    def budget(self) -> int: ...
    @property
    def risen(self) -> int: ...

class OffloadSaved: ...

class OffloadSession:
    def __init__(
        self,
        *,
        target: str,
        folder: str,
        budget: int | None,
        host_limit: int | None,
        raise_when_full: bool,
        streams: int,
        min_bytes: int | None,
        recompute: bool = False,
        moves: bool = True,
        audit: float = 0.0,
    ) -> None: ...
    def never(self, tensors: list[torch.Tensor]) -> None: ...
    def begin(self) -> None: ...
    def end(self) -> None: ...
    def abandon(self) -> None: ...
    @property
    def active(self) -> bool: ...
    def pack(self, tensor: torch.Tensor) -> OffloadSaved: ...
    @staticmethod
    def unpack(saved: OffloadSaved) -> torch.Tensor: ...
    def settle(self) -> None: ...
    def stats(self) -> OffloadStats: ...
    @property
    def measuring(self) -> bool: ...
    def fitted(self) -> FitPlan: ...
    def frontier(self, points: int) -> list[FitPoint]: ...

class FitRow:
    @property
    def module(self) -> str: ...
    @property
    def op(self) -> str: ...
    @property
    def action(self) -> Literal["keep", "offload", "recompute"]: ...
    @property
    def count(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def seconds(self) -> float: ...

class FitPlan:
    """What a Fit does with what autograd saves: rows by action, module and operator."""

    @property
    def rows(self) -> list[FitRow]: ...
    @property
    def promised(self) -> int: ...
    @property
    def least(self) -> int: ...
    @property
    def recompute_seconds(self) -> float: ...
    @property
    def exposed_seconds(self) -> float: ...
    @property
    def denied(self) -> list[str]: ...
    @property
    def saves_nothing(self) -> bool: ...

class FitPoint:
    @property
    def peak(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def kept(self) -> int: ...
    @property
    def moved(self) -> int: ...
    @property
    def recomputed(self) -> int: ...

def enter_module(name: str) -> str: ...

class ShardUnitStats:
    name: str
    bytes: int
    gathers: int
    ahead: int
    reduces: int
    waited_seconds: float
    moving_seconds: float
    lag_seconds: float

class ShardStats:
    passes: int
    order_changes: int
    piece_bytes: int
    gathered_bytes: int
    peak_gathered_bytes: int
    peak_needed_bytes: int
    moved_bytes: int
    reduced_bytes: int
    units: list[ShardUnitStats]
    def __str__(self) -> str: ...
    @property
    def excess(self) -> float: ...

def schedule_names() -> list[str]: ...
def make_schedule(name: str, ranks: int, microbatches: int, chunks: int) -> Schedule: ...
def schedule_from_csv(csv: str, name: str) -> Schedule: ...

class Schedule:
    name: str
    microbatches: int
    @property
    def ranks(self) -> int: ...
    @property
    def stages(self) -> int: ...
    rank_of_stage: list[int]
    def stages_of(self, rank: int) -> list[int]: ...
    def actions(self, rank: int) -> list[tuple[int, str, int]]: ...
    def check(self) -> None: ...
    def csv(self) -> str: ...
    def in_flight(self, rank: int) -> tuple[int, int]: ...
    def peak_bytes(self, rank: int, bytes: list[tuple[int, int]]) -> int: ...
    def send_slots(self) -> int: ...
    def timeline(
        self,
        forward: float,
        input_backward: float,
        weight_backward: float,
        message: float,
        ranks: list[int],
    ) -> tuple[list[list[tuple[float, float]]], list[float], float]: ...

class HostMeter:
    def __init__(self) -> None: ...
    def read(self) -> tuple[int, int]: ...

class PipelineRuntime:
    def __init__(
        self,
        schedule: Schedule,
        stages: list[Any],
        up: torch.distributed.ProcessGroup,
        down: torch.distributed.ProcessGroup,
        side: torch.distributed.ProcessGroup,
        timeout: float,
        strict: bool,
    ) -> None: ...
    def step(
        self,
        train: bool,
        loss: Any,
        batch_rows: list[int],
        target_rows: list[int],
        shapes: int,
    ) -> tuple[torch.Tensor | None, list[list[torch.Tensor | None]]]: ...
    def refuse(self, train: bool, why: str) -> None: ...
    @property
    def failed_in(self) -> str: ...
    @property
    def rank(self) -> int: ...
    def promise(self) -> dict[str, Any]: ...
    def stats(self) -> dict[str, Any]: ...

class Reduced:
    unit: int
    flat: int
    mean: torch.Tensor
    came: list[bool]

class Course:
    def gradients(self, leaves: list[torch.Tensor]) -> int: ...

class Stretch:
    def end(self) -> None: ...
    def made(self, tensor: torch.Tensor) -> bool: ...
    def follow(self, course: Course, passed: Callable[[], None]) -> bool: ...
    def forget(self) -> None: ...

class Sharder:
    def __init__(
        self,
        group: torch.distributed.ProcessGroup,
        replicas: torch.distributed.ProcessGroup | None,
        side: torch.distributed.ProcessGroup,
        store: torch.distributed.distributed_c10d.Store,
        gathered: torch.dtype | None,
        reduced: torch.dtype | None,
        keep: bool,
        on_host: bool,
        prefetch: int,
        prefetch_bytes: int | None,
        timeout: float,
    ) -> None: ...
    def add(
        self, name: str, names: list[list[str]], values: list[list[torch.Tensor]], stays: bool
    ) -> int: ...
    def count(self) -> int: ...
    def keep_first(self, count: int) -> None: ...
    def parameters(self, unit: int, flat: int) -> list[torch.Tensor]: ...
    def pieces(self, unit: int, flat: int) -> list[torch.Tensor]: ...
    def begin_pass(self) -> None: ...
    def give_up_pass(self) -> None: ...
    def enter(self, unit: int, phase: str) -> int: ...
    def require_values(self, unit: int, values: int) -> None: ...
    def leave(self, unit: int, phase: str) -> None: ...
    def hold(self) -> None: ...
    def let_go(self) -> None: ...
    def drop_hold(self) -> None: ...
    def stuck(self) -> list[str]: ...
    def touch(self, unit: int) -> None: ...
    def take(self, unit: int, flat: int, parameter: int, gradient: torch.Tensor) -> None: ...
    def add_up(self, unit: int) -> None: ...
    def end_backward(self, outermost: bool) -> list[Reduced]: ...
    def put_off_sums(self, off: bool) -> None: ...
    def drop_put_off(self) -> None: ...
    def drop_gradients(self) -> None: ...
    def number(self) -> int: ...
    def join(
        self, unit: int, flat: int, pieces: list[torch.Tensor | None]
    ) -> list[torch.Tensor]: ...
    def stats(self) -> ShardStats: ...

# train
class TrainRopeScaling:
    factor: float
    low: float
    high: float
    original_context: int
    def __init__(
        self, *, factor: float, low: float, high: float, original_context: int
    ) -> None: ...

class TrainConfig:
    layers: int
    heads: int
    kv_heads: int
    width: int
    hidden: int
    vocab: int
    context: int
    norm_eps: float
    rope_theta: float
    rope_scaling: TrainRopeScaling | None
    def __init__(
        self,
        *,
        kind: str,
        layers: int,
        heads: int,
        kv_heads: int,
        width: int,
        hidden: int,
        vocab: int,
        context: int,
        norm_eps: float = 1e-5,
        tied: bool = True,
        rope_theta: float = 500000.0,
        rope_scaling: TrainRopeScaling | None = None,
    ) -> None: ...
    @staticmethod
    def named(kind: str, size: str) -> TrainConfig: ...
    @staticmethod
    def read(path: str) -> TrainConfig: ...
    def write(self, path: str) -> None: ...
    @property
    def kind(self) -> str: ...
    @property
    def tied(self) -> bool: ...

class TrainStage:
    def __init__(
        self,
        config: TrainConfig,
        *,
        layers: tuple[int, int] | None = None,
        device: torch.device = ...,
        seed: int | None = None,
    ) -> None: ...
    def forward(self, x: torch.Tensor) -> torch.Tensor: ...
    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...
    def named_weights(self) -> list[tuple[str, torch.Tensor]]: ...
    def tied_weight(self) -> torch.Tensor | None: ...
    def load(self, path: str) -> None: ...
    def sample(
        self,
        prompt: list[int],
        *,
        count: int,
        temperature: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
    ) -> list[int]: ...

def train_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor: ...
def train_split_layers(layers: int, stages: int) -> list[tuple[int, int]]: ...
def train_read_safetensors(path: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]: ...
def train_write_safetensors(
    path: str, weights: list[tuple[str, torch.Tensor]], metadata: dict[str, str]
) -> None: ...

class TrainTokens:
    @staticmethod
    def open(path: str, most_bytes: int = ...) -> TrainTokens: ...
    def __len__(self) -> int: ...
    def read(self, first: int, count: int) -> list[int]: ...
    def split(self, fraction: float) -> tuple[TrainTokens, TrainTokens]: ...

class TrainBatches:
    def __init__(
        self,
        tokens: TrainTokens,
        *,
        rows: int,
        length: int,
        rank: int = 0,
        ranks: int = 1,
        seed: int = 0,
        vocab: int = 256,
    ) -> None: ...
    def next(self) -> tuple[torch.Tensor, torch.Tensor]: ...
    def seek(self, position: int) -> None: ...
    @property
    def position(self) -> int: ...
    @property
    def windows(self) -> int: ...

class TrainAdamW:
    def __init__(
        self,
        weights: list[tuple[str, torch.Tensor]],
        *,
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None: ...
    def step(self, learning_rate: float) -> None: ...
    def zero_grad(self) -> None: ...
    def state(self) -> list[tuple[str, torch.Tensor]]: ...
    def load_state(self, state: list[tuple[str, torch.Tensor]]) -> None: ...

class TrainJob:
    steps: int
    ranks: int
    def __init__(
        self,
        model: TrainConfig,
        data: str,
        *,
        weights: str = "",
        validation: str = "",
        rows: int = 16,
        length: int = 128,
        microbatches: int = 4,
        steps: int,
        learning_rate: float = 6e-4,
        least_learning_rate: float = 0.0,
        warm_up: int = 0,
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        clip: float = 1.0,
        seed: int = 0,
        pp: int = 1,
        vpp: int = 0,
        dp: int = 1,
        schedule: str = "1f1b",
        zero: int = 0,
        offload: str = "none",
        offload_budget: int | None = None,
        fit: int | None = None,
        recompute: bool = False,
        device: torch.device = ...,
        bf16: bool = False,
        evaluate_every: int = 0,
        evaluate_batches: int = 4,
        sample_every: int = 0,
        sample_tokens: int = 128,
        prompt: str = "def ",
        checkpoints: str = "",
        save_every: int = 0,
        keep: int = 2,
        resume: bool = False,
        strict: bool = True,
        timeout: float = 300.0,
    ) -> None: ...
    def check(self, ranks: int) -> None: ...

def train_newest_checkpoint(folder: str) -> str | None: ...

class Trainer:
    begin_step: int
    parameters: int
    def __init__(
        self,
        job: TrainJob,
        *,
        pipe_up: torch.distributed.ProcessGroup,
        pipe_down: torch.distributed.ProcessGroup,
        pipe_side: torch.distributed.ProcessGroup,
        data_group: torch.distributed.ProcessGroup,
        data_side: torch.distributed.ProcessGroup,
        world_side: torch.distributed.ProcessGroup,
        store: torch._C._distributed_c10d.Store,
    ) -> None: ...
    def run(self, listener: object) -> None: ...
    def weights(self) -> list[tuple[str, torch.Tensor]]: ...

class Told:
    number: int
    step: int
    time: float
    own: dict[str, int]
    slots: list[dict[str, tuple[int, int]]]
    peak_rank: int
    peak_row: dict[str, int]
    rows: list[dict[str, int]]
    missed: int
    lost: str
    rowless: str

class TelemetryMonitor:
    def __init__(
        self,
        *,
        every: int,
        who: int,
        rank: int,
        ranks: int,
        stage: int,
        stages: int,
        reads: bool,
        rows_every: int,
        reads_rows: bool,
        groups: list[torch._C._distributed_c10d.Backend],
        levels: int,
        store: torch._C._distributed_c10d.Store | None,
        ring: TelemetryRing | None,
        most_due: int = 4096,
    ) -> None: ...
    def step(self) -> bool: ...
    def next(self, seconds: float) -> Told | None: ...
    known: int
    over: bool
    def recent(self) -> list[dict[str, float]]: ...
    def extremes(self) -> dict[str, int]: ...
    collectives: int
    knows_peaks: bool
    def close(self, seconds: float) -> None: ...

telemetry_most_members: int

def telemetry_keys() -> list[tuple[str, str, str, bool, str]]: ...
def telemetry_layout() -> str: ...
def telemetry_words(
    figures: dict[str, int], rank: int, stage: int, stages: int, keys: int = ...
) -> list[int]: ...
def telemetry_slots(words: list[int], keys: int = ...) -> list[dict[str, tuple[int, int]]]: ...

class TelemetryRing:
    """The last rows of this rank in a file; a context manager that closes it."""

    def __init__(
        self,
        folder: str,
        *,
        host: str,
        rank: int,
        ranks: int,
        stage: int = 0,
        stages: int = 1,
        role: str = "",
        attempt: int = 0,
        slots: int = 512,
    ) -> None: ...
    @property
    def path(self) -> str: ...
    @property
    def appended(self) -> int: ...
    def append(self, step: int, figures: dict[str, int], when: int | None = None) -> None: ...
    def flush(self) -> None: ...
    def note(self, reason: str) -> None: ...
    def close(self, reason: str = "ended") -> None: ...
    def __enter__(self) -> TelemetryRing: ...
    def __exit__(self, *exception: object) -> None: ...

class Flight:
    """The flight recorder's threads."""

    def __init__(self, path: str, identity: str) -> None: ...
    def take_signals(self, headlines: dict[int, str], seconds: float) -> None: ...
    def watch(
        self, store: Any, file: str, prefix: str, rank: int, ranks: int, headline: str
    ) -> None: ...
    def tell(self, text: str) -> bool: ...
    def next(self) -> tuple[int, int, str] | None: ...
    def done(self, number: int) -> None: ...
    def row(self, headline: str) -> str: ...
    def keep(self) -> None: ...
    def remember(self, earlier: str) -> None: ...
    def close(self) -> None: ...

_Member = tuple[str, int, int]

class StoreHandle:
    """What and where a stored tensor is. Role, rank and incarnation are its owner."""

    @property
    def job(self) -> str: ...
    @property
    def owner(self) -> _Member: ...
    @property
    def scope(self) -> tuple[str, str]: ...
    @property
    def id(self) -> tuple[int, int]: ...
    @property
    def bytes(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def stored(self) -> bool: ...
    @property
    def why(self) -> str: ...
    @property
    def address(self) -> tuple[str, int]: ...
    def text(self) -> str: ...
    @staticmethod
    def from_text(text: str) -> StoreHandle: ...
    def encode(self) -> builtins.bytes: ...
    @staticmethod
    def decode(encoded: builtins.bytes) -> StoreHandle: ...

class StoreFetch:
    """A fetch that counts once its caller has the tensors."""

    def accept(self) -> list[torch.Tensor]: ...

class Store:
    """One process's membership in a job's store."""

    def __init__(
        self,
        *,
        job: str,
        role: str,
        rank: int,
        listen: str | None,
        advertise: str,
        secret: str,
        secret_file: str,
        cap: int,
        when_full: str,
        spill_folder: str,
        lease_ms: int,
        timeout_ms: int,
        tls: tuple[str, str, str] | None,
    ) -> None: ...
    @property
    def owner(self) -> _Member: ...
    @property
    def job(self) -> str: ...
    @property
    def address(self) -> tuple[str, int]: ...
    @property
    def socket(self) -> str: ...
    def put(
        self,
        kind: str,
        key: str,
        tensor: torch.Tensor,
        listed: list[tuple[str, int | None]] | None,
        count: int | None,
        call: str,
        attempt: int | None,
        site: str,
    ) -> StoreHandle: ...
    def unstored(self, kind: str, key: str, tensor: torch.Tensor, why: str) -> StoreHandle: ...
    def get_all(
        self,
        *,
        handles: list[StoreHandle],
        rows: tuple[int, int | None],
        into: list[torch.Tensor],
        device: torch.device | None,
        readonly: bool,
        more: bool,
        keep: bool,
        tcp: bool,
        timeout_ms: int | None,
    ) -> list[torch.Tensor]: ...
    def fetch(
        self,
        *,
        handles: list[StoreHandle],
        rows: tuple[int, int | None],
        into: list[torch.Tensor],
        device: torch.device | None,
        readonly: bool,
        more: bool,
        keep: bool,
        tcp: bool,
        timeout_ms: int | None,
    ) -> StoreFetch: ...
    def begin_call(self, kind: str, key: str, call: str) -> int: ...
    def fail_call(self, kind: str, key: str, call: str, attempt: int) -> None: ...
    def adopt(self, kind: str, key: str, handles: list[StoreHandle]) -> None: ...
    def close(self, kind: str, key: str) -> dict[str, Any]: ...
    def account(self, kind: str, key: str) -> dict[str, Any]: ...
    def free(self, handles: list[StoreHandle]) -> tuple[int, list[tuple[_Member, str, str]]]: ...
    def forget(self, handles: list[StoreHandle]) -> int: ...
    def forget_scope(self, kind: str, key: str) -> int: ...
    def kept_of(self, kind: str, key: str) -> int: ...
    def stats(self) -> dict[str, int]: ...
    def list(self, first: int, most: int) -> tuple[builtins.list[dict[str, Any]], int]: ...
    def still_mapped(self) -> builtins.list[dict[str, Any]]: ...
    def ask_stats(self, socket: str) -> str: ...
    def ask_list(self, socket: str, first: int, most: int) -> tuple[str, int]: ...

def store_folder(job: str) -> str: ...
def store_sockets(job: str) -> list[str]: ...
