#include "bindings/communicator.h"

#include <cstring>
#include <utility>

#include "bindings/arguments.h"
#include "bindings/errors.h"
#include "bindings/log.h"
#include "bindings/store.h"
#include "bindings/tensor.h"
#include "turnout/communicator.h"

namespace turnout::python {

namespace {

CommunicatorOptions options_of(const char* transport, nb::handle node_of_rank, nb::handle timeout, uint64_t scheduler_seed) {
  follow_log_level();
  CommunicatorOptions options;
  options.transport = transport;
  options.node_of_rank = ints_of(node_of_rank, "Communicator: node_of_rank");
  if (!timeout.is_none()) options.timeout = duration_of(timeout, "Communicator: timeout");
  options.scheduler_seed = scheduler_seed;
  return options;
}

CommunicatorHolder hold(Communicator communicator) { return CommunicatorHolder(std::move(communicator)); }

CommunicatorHolder from_env(const char* transport, nb::object node_of_rank, nb::object timeout) {
  const CommunicatorOptions options = options_of(transport, node_of_rank, timeout, 0);
  const UnderWay call;
  const nb::gil_scoped_release unlocked;
  return hold(Communicator::from_env(options));
}

CommunicatorHolder from_store(nb::object store, int rank, int num_ranks, const char* name, const char* transport, nb::object node_of_rank,
                              nb::object timeout) {
  const CommunicatorOptions options = options_of(transport, node_of_rank, timeout, 0);
  const std::string named = name;
  std::shared_ptr<Store> made = store_of(std::move(store));
  const UnderWay call;
  const nb::gil_scoped_release unlocked;
  return hold(Communicator::from_store(std::move(made), rank, num_ranks, named, options));
}

nb::list all_gather(CommunicatorHolder& self, nb::handle data) {
  const auto communicator = self.communicator.get();
  Py_buffer mine;
  if (PyObject_GetBuffer(data.ptr(), &mine, PyBUF_SIMPLE) != 0) {
    PyErr_Clear();
    throw InvalidArgument("all_gather: data is " + describe(data) + ", but must be bytes, or another contiguous buffer of them");
  }
  std::vector<std::byte> bytes(static_cast<size_t>(mine.len));
  if (mine.len > 0) std::memcpy(bytes.data(), mine.buf, bytes.size());
  PyBuffer_Release(&mine);
  std::vector<std::vector<std::byte>> all;
  {
    const UnderWay call;
    const nb::gil_scoped_release unlocked;
    all = communicator->all_gather(bytes);
  }
  nb::list result;
  for (const auto& theirs : all) result.append(nb::bytes(theirs.data(), theirs.size()));
  return result;
}

void barrier(CommunicatorHolder& self) {
  const auto communicator = self.communicator.get();
  const UnderWay call;
  const nb::gil_scoped_release unlocked;
  communicator->barrier();
}

CommunicatorHolder sub_group(CommunicatorHolder& self, nb::object members, const char* name) {
  const auto communicator = self.communicator.get();
  const std::vector<int> ranks = ints_of(members, "sub_group: members");
  const std::string named = name;
  const UnderWay call;
  const nb::gil_scoped_release unlocked;
  return hold(communicator->sub_group(ranks, named));
}

void close(CommunicatorHolder& self) {
  const Unlocked unlocked;
  self.communicator.reset();
}

/// One rank of run_virtual_ranks(), with the interpreter's lock. Returns what the body returned; an exception goes to `failure`.
nb::object run_body(Communicator& communicator, nb::handle body, nb::object& failure) {
  const nb::object mine = nb::cast(hold(std::move(communicator)));
  auto& holder = nb::cast<CommunicatorHolder&>(mine);
  nb::object result = nb::none();
  try {
    result = body(mine);
  } catch (nb::python_error& error) {
    failure = nb::borrow(error.value());
    // The traceback keeps the Buffers that the body made, but the other ranks must not wait for this one.
    holder.close_buffers();
  }
  close(holder);
  return result;
}

/// Of several exceptions that which explains the others: ranks that lost a peer tell less than the peer does.
nb::handle cause_of(const std::vector<nb::object>& failures) {
  const nb::object errors = nb::module_::import_("turnout.errors");
  const nb::object of_peers = nb::make_tuple(errors.attr("PeerFailed"), errors.attr("PeerTimeout"));
  nb::handle first;
  for (const nb::object& failure : failures) {
    if (!failure.is_valid()) continue;
    if (!nb::isinstance(failure, of_peers)) return failure;
    if (!first.is_valid()) first = failure;
  }
  return first;
}

nb::list virtual_ranks(int num_ranks, nb::object body, const char* transport, nb::object node_of_rank, nb::object timeout, uint64_t scheduler_seed) {
  const CommunicatorOptions options = options_of(transport, node_of_rank, timeout, scheduler_seed);
  if (!PyCallable_Check(body.ptr())) {
    throw InvalidArgument("run_virtual_ranks: body is " + describe(body) + ", but must be a function that takes a Communicator");
  }
  std::vector<nb::object> results(static_cast<size_t>(std::max(num_ranks, 0))), failures(results.size());
  std::exception_ptr trouble;
  {
    const UnderWay call;
    const nb::gil_scoped_release unlocked;
    try {
      run_virtual_ranks(
          num_ranks,
          [&](Communicator& communicator) {
            const auto rank = static_cast<size_t>(communicator.rank());
            const nb::gil_scoped_acquire locked;
            results[rank] = run_body(communicator, body, failures[rank]);
          },
          options);
    } catch (...) {
      trouble = std::current_exception();
    }
  }
  if (const nb::handle cause = cause_of(failures); cause.is_valid()) {
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(cause.ptr())), cause.ptr());
    throw nb::python_error();
  }
  if (trouble) std::rethrow_exception(trouble);
  nb::list all;
  for (nb::object& result : results) all.append(std::move(result));
  return all;
}

}  // namespace

CommunicatorHolder::CommunicatorHolder(Communicator made) : communicator("Communicator", std::make_shared<Communicator>(std::move(made))) {
  // There is nothing to tell its peers; what it has in this process (threads) goes before the process does.
  close_at_exit(
      communicator.get(), [] {}, communicator.let_go());
}

void CommunicatorHolder::close_buffers() {
  const Unlocked unlocked;
  for (const auto& buffer : buffers) {
    if (const auto open = buffer.lock()) open->close();
  }
}

void bind_communicator(nb::module_& m) {
  using Holder = CommunicatorHolder;
  nb::class_<Holder>(m, "Communicator", R"(Who the ranks are and how they reach each other.

Made by from_env, from_store, sub_group, or for the body of run_virtual_ranks. Buffers keep what they need of it, so it may be
dropped first. Dropping it is local: it never waits for a peer.)")
      .def_static(
          "from_env", &from_env, nb::kw_only(), nb::arg("transport") = "auto", nb::arg("node_of_rank") = nb::none(), nb::arg("timeout") = nb::none(),
          nb::sig(
              "def from_env(*, transport: str = 'auto', node_of_rank: Sequence[int] | None = None, timeout: float | None = None) -> Communicator"),
          R"(From the environment of torchrun, mpirun, srun or `turnout launch`; without any of them, one rank. Collective.

transport: 'auto', 'inproc' (threads), 'shm' (processes of one machine). node_of_rank: the node of every rank, the same on all
ranks. timeout: seconds of each step of the rendezvous; None: TURNOUT_BOOTSTRAP_TIMEOUT_MS, which is 60 s unless set.
Raises InvalidArgument (a variable), TransportError, PeerTimeout (ranks that did not come).)")
      .def_static("from_store", &from_store, nb::arg("store"), nb::arg("rank"), nb::arg("num_ranks"), nb::arg("name") = "world", nb::kw_only(),
                  nb::arg("transport") = "auto", nb::arg("node_of_rank") = nb::none(), nb::arg("timeout") = nb::none(),
                  nb::sig("def from_store(store: object, rank: int, num_ranks: int, name: str = 'world', *, transport: str = 'auto', "
                          "node_of_rank: Sequence[int] | None = None, timeout: float | None = None) -> Communicator"),
                  R"(From a store of keys and values that all ranks share. Collective over num_ranks ranks.

store: torch.distributed's, or any object with set(key, bytes) and get(key), which returns bytes, or None (or raises KeyError)
while there are none. Calls may come from any thread. `name` tells apart Communicators that share a store. The rest as from_env.)")
      .def_prop_ro("rank", [](const Holder& h) { return h.communicator.get()->rank(); })
      .def_prop_ro("num_ranks", [](const Holder& h) { return h.communicator.get()->num_ranks(); })
      .def_prop_ro(
          "node", [](const Holder& h) { return h.communicator.get()->node(); }, "Node of this rank.")
      .def_prop_ro("num_nodes", [](const Holder& h) { return h.communicator.get()->num_nodes(); })
      .def_prop_ro(
          "local_rank", [](const Holder& h) { return h.communicator.get()->local_rank(); }, "Index of this rank within its node.")
      .def_prop_ro(
          "transport", [](const Holder& h) { return std::string(h.communicator.get()->transport()); }, "'inproc' or 'shm'.")
      .def("all_gather", &all_gather, nb::arg("data"), nb::sig("def all_gather(self, data: bytes) -> list[bytes]"),
           "The bytes of every rank, in rank order; lengths may differ. Collective. Raises PeerTimeout, TransportError.")
      .def("barrier", &barrier, "Returns when every rank has arrived. Collective. Raises PeerTimeout, TransportError.")
      .def("sub_group", &sub_group, nb::arg("members"), nb::arg("name") = "sub",
           nb::sig("def sub_group(self, members: Sequence[int], name: str = 'sub') -> Communicator"),
           "A Communicator of `members`: ascending ranks of this one, this rank among them. Collective over the members. `name` tells apart "
           "groups of the same members.")
      .def("close", &close, "Lets go of it; Buffers made from it go on. Local, idempotent.")
      .def(
          "__enter__", [](nb::object self) { return self; }, nb::sig("def __enter__(self) -> Communicator"))
      .def(
          "__exit__", [](Holder& h, nb::args) { close(h); }, nb::sig("def __exit__(self, *args: object) -> None"))
      .def("__repr__", [](const Holder& h) {
        if (!h.communicator.is_here()) return std::string("<turnout.Communicator, closed>");
        const Communicator& c = *h.communicator.get();
        return "<turnout.Communicator rank " + std::to_string(c.rank()) + " of " + std::to_string(c.num_ranks()) + " over " +
               std::string(c.transport()) + ">";
      });
  m.def("run_virtual_ranks", &virtual_ranks, nb::arg("num_ranks"), nb::arg("body"), nb::kw_only(), nb::arg("transport") = "auto",
        nb::arg("node_of_rank") = nb::none(), nb::arg("timeout") = nb::none(), nb::arg("scheduler_seed") = 0,
        nb::sig("def run_virtual_ranks(num_ranks: int, body: Callable[[Communicator], T], *, transport: str = 'auto', "
                "node_of_rank: Sequence[int] | None = None, timeout: float | None = None, scheduler_seed: int = 0) -> list[T]"),
        R"(Runs body(communicator) on num_ranks threads, each a virtual rank of its own, and returns what they returned, in rank order.

When a body raises, the Buffers of its rank are closed, so that the others raise PeerFailed instead of waiting; the exception of the
lowest rank that failed by itself comes out here. scheduler_seed: not 0: delays and reorders what moves between ranks (tests).)");
}

}  // namespace turnout::python
