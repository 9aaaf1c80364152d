#include "bindings/handle.h"

#include <atomic>
#include <map>
#include <mutex>
#include <string>

#include "bindings/array.h"
#include "engine/routing.h"
#include "turnout/error.h"

namespace turnout::python {

namespace {

/// A handle as a tensor of one number, for operators that take and give tensors only. Whoever has the tensor keeps the handle.
struct Token {
  int64_t id = 0;
  std::shared_ptr<KeptHandle> handle;
  Token(int64_t number, std::shared_ptr<KeptHandle> given) : id(number), handle(std::move(given)) {}
  Token(const Token&) = delete;
  Token& operator=(const Token&) = delete;
  ~Token();
};

/// The handles whose tokens are there. Never destroyed: tensors may outlive the module.
struct Tokens {
  std::mutex mutex;
  int64_t last = 0;
  std::map<int64_t, Token*> there;
};
Tokens& tokens() {
  static Tokens* const all = new Tokens;
  return *all;
}

Token::~Token() {
  const std::lock_guard lock(tokens().mutex);
  tokens().there.erase(id);
}

nb::object token_of(const HandleHolder& holder, bool for_torch) {
  Tokens& all = tokens();
  const std::shared_ptr<KeptHandle>& handle = holder.kept.get();
  const std::lock_guard lock(all.mutex);
  auto token = std::make_shared<Token>(++all.last, handle);
  all.there[token->id] = token.get();
  return array_of(for_torch ? Framework::torch : Framework::other, TensorView::dense(&token->id, DType::i64, {1}), token, nullptr);
}

HandleHolder handle_of(int64_t id) {
  const std::lock_guard lock(tokens().mutex);
  const auto found = tokens().there.find(id);
  if (found == tokens().there.end()) {
    throw InvalidArgument("handle is " + std::to_string(id) +
                          ", which is no handle of this process: give the tensor that dispatch gave, not a copy " + "that outlives it");
  }
  return HandleHolder(found->second->handle);
}

}  // namespace

KeptHandle::~KeptHandle() {
  if (handle && handle.routing()->device) let_go_unlocked(handle);
}

void bind_handle(nb::module_& m) {
  using Holder = HandleHolder;
  nb::class_<Holder>(m, "Handle", R"(The routing of a dispatch: what combine() and a cached dispatch() need to know of it.

It may be used any number of times, in any order, on any lane of the Buffer that made it, by all ranks alike.)")
      .def_prop_ro(
          "num_tokens", [](const Holder& h) { return h.handle().num_tokens(); }, "Tokens that this rank sent.")
      .def_prop_ro(
          "num_topk", [](const Holder& h) { return h.handle().num_topk(); }, "Experts per token.")
      .def_prop_ro(
          "num_rows", [](const Holder& h) { return h.handle().num_rows(); }, "Rows that this rank received (expert_slab: the sum of its counts).")
      .def_prop_ro(
          "layout", [](const Holder& h) { return std::string(name(h.handle().layout())); }, "'rank_major', 'expert_major' or 'expert_slab'.")
      .def("__repr__", [](const Holder& h) {
        if (!h.kept.is_here()) return std::string("<turnout.Handle of another process>");
        const Handle& handle = h.handle();
        return "<turnout.Handle of " + std::to_string(handle.num_tokens()) + " tokens, " + std::string(name(handle.layout())) + ">";
      });
  m.def("token_of", &token_of, nb::arg("handle"), nb::arg("for_torch") = false,
        nb::sig("def token_of(handle: Handle, for_torch: bool = False) -> Any"),
        "int64 [1], a number of the handle, as an Array or a tensor of torch; the handle lives as long as its memory.");
  m.def("handle_of", &handle_of, nb::arg("token"), "The handle of a token's number.");
}

}  // namespace turnout::python
