"""The C++ library. Use it through the package turnout."""



from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from typing_extensions import Self

T = TypeVar("T")

class Memory:
    """Bytes of a result, by the buffer protocol."""

class Array:
    """
    An array of a result, for libraries that take DLPack (jax.dlpack.from_dlpack, cupy.from_dlpack), and for numpy.asarray.

    Its memory is a result's: a lease goes back when the last array of it is gone.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def strides(self) -> tuple[int, ...]:
        """In elements."""

    @property
    def dtype(self) -> object:
        """NumPy's dtype; bf16 and fp8 are those of ml_dtypes."""

    @property
    def device(self) -> str: ...

    @property
    def data_ptr(self) -> int:
        """Address of the first element."""

    def __repr__(self) -> str: ...

    def __array__(self, dtype: object = None, copy: object = None) -> object: ...

    def __dlpack__(self, *, stream: int | None = None, max_version: object = None, dl_device: object = None, copy: bool | None = None) -> object: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...

class Tagged:
    """
    An array whose elements are said to be of another type of the same size: turnout.array makes it.
    """

    def __init__(self, base: object, dtype: str) -> None: ...

class Communicator:
    """
    Who the ranks are and how they reach each other.

    Made by from_env, from_store, sub_group, or for the body of run_virtual_ranks. Buffers keep what they need of it, so it may be
    dropped first. Dropping it is local: it never waits for a peer.
    """

    @staticmethod
    def from_env(*, transport: str = 'auto', node_of_rank: Sequence[int] | None = None, timeout: float | None = None) -> Communicator:
        """
        From the environment of torchrun, mpirun, srun or `turnout launch`; without any of them, one rank. Collective.

        transport: 'auto', 'inproc' (threads), 'shm' (processes of one machine). node_of_rank: the node of every rank, the same on all
        ranks. timeout: seconds of each step of the rendezvous; None: TURNOUT_BOOTSTRAP_TIMEOUT_MS, which is 60 s unless set.
        Raises InvalidArgument (a variable), TransportError, PeerTimeout (ranks that did not come).
        """

    @staticmethod
    def from_store(store: object, rank: int, num_ranks: int, name: str = 'world', *, transport: str = 'auto', node_of_rank: Sequence[int] | None = None, timeout: float | None = None) -> Communicator:
        """
        From a store of keys and values that all ranks share. Collective over num_ranks ranks.

        store: torch.distributed's, or any object with set(key, bytes) and get(key), which returns bytes, or None (or raises KeyError)
        while there are none. Calls may come from any thread. `name` tells apart Communicators that share a store. The rest as from_env.
        """

    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    @property
    def node(self) -> int:
        """Node of this rank."""

    @property
    def num_nodes(self) -> int: ...

    @property
    def local_rank(self) -> int:
        """Index of this rank within its node."""

    @property
    def transport(self) -> str:
        """'inproc' or 'shm'."""

    def all_gather(self, data: bytes) -> list[bytes]:
        """
        The bytes of every rank, in rank order; lengths may differ. Collective. Raises PeerTimeout, TransportError.
        """

    def barrier(self) -> None:
        """
        Returns when every rank has arrived. Collective. Raises PeerTimeout, TransportError.
        """

    def sub_group(self, members: Sequence[int], name: str = 'sub') -> Communicator:
        """
        A Communicator of `members`: ascending ranks of this one, this rank among them. Collective over the members. `name` tells apart groups of the same members.
        """

    def close(self) -> None:
        """Lets go of it; Buffers made from it go on. Local, idempotent."""

    def __enter__(self) -> Communicator: ...

    def __exit__(self, *args: object) -> None: ...

    def __repr__(self) -> str: ...

def run_virtual_ranks(num_ranks: int, body: Callable[[Communicator], T], *, transport: str = 'auto', node_of_rank: Sequence[int] | None = None, timeout: float | None = None, scheduler_seed: int = 0) -> list[T]:
    """
    Runs body(communicator) on num_ranks threads, each a virtual rank of its own, and returns what they returned, in rank order.

    When a body raises, the Buffers of its rank are closed, so that the others raise PeerFailed instead of waiting; the exception of the
    lowest rank that failed by itself comes out here. scheduler_seed: not 0: delays and reorders what moves between ranks (tests).
    """

class Handle:
    """
    The routing of a dispatch: what combine() and a cached dispatch() need to know of it.

    It may be used any number of times, in any order, on any lane of the Buffer that made it, by all ranks alike.
    """

    @property
    def num_tokens(self) -> int:
        """Tokens that this rank sent."""

    @property
    def num_topk(self) -> int:
        """Experts per token."""

    @property
    def num_rows(self) -> int:
        """Rows that this rank received (expert_slab: the sum of its counts)."""

    @property
    def layout(self) -> str:
        """'rank_major', 'expert_major' or 'expert_slab'."""

    def __repr__(self) -> str: ...

def token_of(handle: Handle, for_torch: bool = False) -> Any:
    """
    int64 [1], a number of the handle, as an Array or a tensor of torch; the handle lives as long as its memory.
    """

def handle_of(token: int) -> Handle:
    """The handle of a token's number."""

class DispatchResult:
    """
    What arrived. N rows, K experts per token, C rows per expert of a slab, Le local experts.

    Arrays are of the framework that x was of. With a capacity the first dimension of the row arrays is the capacity, and num_rows says
    how many are real. The memory lives as long as this object or any of its arrays.
    """

    @property
    def x(self) -> Any:
        """
        rank_major and expert_major [N, H], expert_slab [Le, C, H]; the row stride may exceed H.
        """

    @property
    def x_scales(self) -> Any:
        """
        With quantize: fp32 or ue8m0 [N, ceil(H/128)], slab [Le, C, ceil(H/128)], as scale_order says; else None.
        """

    @property
    def side(self) -> Any:
        """A tuple: the side arrays as given, with the rows of x."""

    @property
    def topk_idx(self) -> Any:
        """rank_major: int32 [N, K] local expert, -1 where not local; else None."""

    @property
    def topk_weights(self) -> Any:
        """
        fp32: rank_major [N, K] (0 where not local), expert_major [N], slab [Le, C]; None without weights.
        """

    @property
    def num_rows(self) -> Any:
        """int64 [1]: rows present (expert_major: padding included)."""

    @property
    def expert_counts(self) -> Any:
        """int32 [Le]: rows of each local expert, without padding."""

    @property
    def expert_offsets(self) -> Any:
        """
        int64 [Le + 1]: where each group starts, in rows of x (expert_major) or in sorted_rows (rank_major).
        """

    @property
    def sorted_rows(self) -> Any:
        """rank_major: int32, rows of x grouped by expert; else None."""

    @property
    def num_dropped(self) -> Any:
        """int64 [1]: rows that exceeded the capacity."""

    @property
    def arrived(self) -> Any:
        """int64 [num_ranks]: rows of each source rank."""

    @property
    def handle(self) -> Handle:
        """The routing, for combine() and cached dispatches."""

    @property
    def _recv_begin(self) -> object: ...

    @property
    def is_lease(self) -> bool:
        """Whether x lies in the receive region."""

    def __repr__(self) -> str: ...

    def release(self) -> None:
        """
        Lets go of the memory now. What arrays of it are still there keep it; a lease goes back when the last of them is gone, in order of the stream. Idempotent.
        """

    def __enter__(self) -> Self: ...

    def __exit__(self, *args: object) -> None: ...

class CombineResult:
    """
    What came back. T tokens of this rank, K experts per token. Arrays are of the framework that y was of.
    """

    @property
    def x(self) -> Any:
        """[T, H] of y's dtype; 0 for a token without rows."""

    @property
    def side(self) -> Any:
        """fp32 [T, K], 0 where there is no row; None without side."""

    @property
    def num_lost(self) -> Any:
        """int32 [T]: terms omitted for capacity or a masked rank."""

    def __repr__(self) -> str: ...

    def release(self) -> None:
        """
        Lets go of the memory now. What arrays of it are still there keep it; a lease goes back when the last of them is gone, in order of the stream. Idempotent.
        """

    def __enter__(self) -> Self: ...

    def __exit__(self, *args: object) -> None: ...

class PendingDispatch:
    """
    A call that was issued. Its inputs must stay unchanged until wait(). One that is dropped is waited for, and its result with it.
    """

    def wait(self) -> DispatchResult:
        """
        Receives what the call brought. Raises as the call itself; InvalidArgument the second time.
        """

    @property
    def arrived(self) -> Any:
        """
        receive='resident': int64 [num_ranks], rows of each source rank present so far; it grows by itself.
        """

class PendingCombine:
    """
    A call that was issued. Its inputs must stay unchanged until wait(). One that is dropped is waited for, and its result with it.
    """

    def wait(self) -> CombineResult:
        """
        Receives what the call brought. Raises as the call itself; InvalidArgument the second time.
        """

class BoundDispatch:
    """
    dispatch() with arguments that were read once: Buffer.bind_dispatch makes it.
    """

    def __call__(self) -> DispatchResult:
        """
        Makes the call with what is in the arrays now. Collective, and raises, as dispatch().
        """

    def __repr__(self) -> str: ...

class BoundCombine:
    """
    combine() with arguments that were read once: Buffer.bind_combine makes it.
    """

    def __call__(self, handle: Handle | None = None) -> CombineResult:
        """
        Makes the call with what is in the arrays now, along `handle`, if one is given, instead of the bound one. Collective, and raises, as combine().
        """

    def __repr__(self) -> str: ...

class Buffer:
    """The body of turnout.Buffer."""

    def __init__(self, communicator: Communicator, config: dict[str, object], allocator: object) -> None: ...

    def _dispatch(self, *args: object) -> DispatchResult: ...

    def _dispatch_async(self, *args: object) -> PendingDispatch: ...

    def _combine(self, *args: object) -> CombineResult: ...

    def _combine_async(self, *args: object) -> PendingCombine: ...

    def _bind_dispatch(self, *args: object) -> BoundDispatch: ...

    def _bind_combine(self, *args: object) -> BoundCombine: ...

    def _refuse(self, call: str, lane: int) -> None:
        """Tells all ranks that this one does not make the call."""

    def set_expert_to_rank(self, expert_to_rank: Sequence[int]) -> None:
        """
        Changes the owner of every expert from the next call on: all ranks with the same map before the same call, else that call raises. Handles made before keep their own map.
        """

    def check(self) -> None:
        """
        Raises what an earlier asynchronous failure left; cheap, does not wait.
        """

    def synchronize(self) -> None:
        """check() after everything issued has finished."""

    def recover(self) -> None:
        """
        Ends the abort that an expired wait left. Collective; every pending call is lost.
        """

    def suspend(self) -> None:
        """
        GPU, collective, no call under way: gives the symmetric memory back; leases lose their rows. Raises InvalidArgument on a CPU.
        """

    def resume(self) -> None:
        """
        Maps fresh memory at the same addresses. Collective. Raises TransportError.
        """

    def close(self) -> None:
        """
        Later calls raise InvalidArgument; peers that wait for this rank raise PeerFailed. Local, idempotent.
        """

    def __enter__(self) -> Self: ...

    def __exit__(self, *args: object) -> None: ...

    def __repr__(self) -> str: ...

    @property
    def config(self) -> dict[str, Any]:
        """
        The configuration as it is used, by the names of the constructor's arguments.
        """

    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    @property
    def num_local_experts(self) -> int: ...

    @property
    def num_fresh_results(self) -> int:
        """Dispatches with result='auto' that found no lease."""

    @property
    def num_bytes(self) -> int:
        """Symmetric memory of this rank, in bytes."""

    @property
    def status_word(self) -> int:
        """
        Address of a uint64 that is not 0 once the Buffer is aborted (on a GPU: in its memory).
        """

def required_bytes(config: dict[str, object], num_ranks: int) -> int: ...

def xla_handlers(on_gpu: bool) -> dict[str, Any]:
    """Handlers for jax.ffi.register_ffi_target, by target."""

def xla_register(buffers: dict[int, Buffer], num_handles: int) -> int:
    """
    The number by which programs find these Buffers, one for each device of this process; the last num_handles routings are kept.
    """

def xla_routing_bytes(buffer: Buffer, num_tokens: int, num_topk: int, has_weights: bool, layout: int, capacity: int, expert_alignment: int) -> int:
    """Bytes that the routing of such a dispatch on a GPU has."""

def xla_forget(number: int) -> None:
    """What xla_register() did is undone."""

def run_command(program: list[str], arguments: list[str]) -> int:
    """
    Does what `turnout ARGUMENTS` does and returns its exit status. program: words that start it again, once per rank.
    """

def _stop_log() -> None:
    """
    Hands on what was logged; later lines go to stderr: at the exit of the interpreter.
    """

def _close_all() -> None:
    """
    Closes what is open and waits for calls under way: at the exit of the interpreter.
    """

__version__: str
