#include "bindings/store.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <thread>

#include "bindings/errors.h"
#include "bindings/lifetime.h"
#include "bindings/tensor.h"

namespace turnout::python {

namespace {

using Clock = std::chrono::steady_clock;

/// What both kinds share: the object, and errors of its calls as TransportError.
class PythonStore : public Store {
 public:
  explicit PythonStore(nb::object object) : object_(object.release().ptr()) {}
  ~PythonStore() override { drop(object_); }

 protected:
  template <class Body>
  auto guarded(const char* what, const std::string& key, const Body& body) {
    try {
      return body();
    } catch (nb::python_error& error) {
      throw TransportError(std::string("the store's ") + what + "('" + key + "') raised: " + words_of(error));
    }
  }
  nb::handle object() const { return object_; }

  static std::vector<std::byte> bytes_of(nb::handle value) {
    char* data = nullptr;
    Py_ssize_t size = 0;
    const nb::object bytes = nb::steal(PyBytes_FromObject(value.ptr()));
    if (!bytes.is_valid() || PyBytes_AsStringAndSize(bytes.ptr(), &data, &size) != 0) throw nb::python_error();
    const auto* const first = reinterpret_cast<const std::byte*>(data);
    return {first, first + size};
  }

 public:
  void set(const std::string& key, std::span<const std::byte> value) override {
    const nb::gil_scoped_acquire locked;
    guarded("set", key, [&] { object().attr("set")(key.c_str(), nb::bytes(value.data(), value.size())); });
  }

 private:
  PyObject* const object_;
};

/// torch.distributed.Store: get() waits and raises after the store's own timeout, so wait() goes first. It waits in short steps, because
/// torch's TCPStore serves no other thread meanwhile.
class TorchStore final : public PythonStore {
 public:
  using PythonStore::PythonStore;
  std::optional<std::vector<std::byte>> get(const std::string& key, std::chrono::milliseconds timeout) override {
    const auto deadline = Clock::now() + timeout;
    const nb::gil_scoped_acquire locked;
    return guarded("get", key, [&]() -> std::optional<std::vector<std::byte>> {
      const nb::object timedelta = nb::module_::import_("datetime").attr("timedelta");
      nb::list keys;
      keys.append(key.c_str());
      for (;;) {
        const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
        const auto step = std::clamp(left, std::chrono::milliseconds(1), std::chrono::milliseconds(100));
        try {
          object().attr("wait")(keys, timedelta(nb::arg("milliseconds") = step.count()));
          return bytes_of(object().attr("get")(key.c_str()));
        } catch (nb::python_error&) {
          if (nb::cast<bool>(object().attr("check")(keys))) continue;  // it came just now; a store that is gone raises here
          if (Clock::now() >= deadline) return std::nullopt;
        }
      }
    });
  }
  void erase(const std::string& key) override {
    const nb::gil_scoped_acquire locked;
    try {
      object().attr("delete_key")(key.c_str());
    } catch (nb::python_error&) {
      // Not all of torch's stores can.
    }
  }
};

/// Any object: get() gives bytes, or None, or raises KeyError, while there is no value yet.
class PolledStore final : public PythonStore {
 public:
  using PythonStore::PythonStore;
  std::optional<std::vector<std::byte>> get(const std::string& key, std::chrono::milliseconds timeout) override {
    const auto deadline = Clock::now() + timeout;
    for (std::chrono::microseconds pause{100};; pause = std::min(pause * 2, std::chrono::microseconds(20'000))) {
      if (auto value = try_get(key)) return value;
      if (Clock::now() >= deadline) return std::nullopt;
      std::this_thread::sleep_for(pause);
    }
  }
  void erase(const std::string& key) override {
    const nb::gil_scoped_acquire locked;
    try {
      if (nb::hasattr(object(), "delete")) object().attr("delete")(key.c_str());
    } catch (nb::python_error&) {
      // Forgetting is a kindness, not a duty.
    }
  }

 private:
  std::optional<std::vector<std::byte>> try_get(const std::string& key) {
    const nb::gil_scoped_acquire locked;
    return guarded("get", key, [&]() -> std::optional<std::vector<std::byte>> {
      try {
        const nb::object value = object().attr("get")(key.c_str());
        if (!value.is_none()) return bytes_of(value);
      } catch (nb::python_error& error) {
        if (!error.matches(PyExc_KeyError)) throw;
      }
      return std::nullopt;
    });
  }
};

}  // namespace

std::shared_ptr<Store> store_of(nb::object object) {
  const auto has = [&](const char* name) { return nb::hasattr(object, name); };
  if (!has("set") || !has("get")) {
    throw InvalidArgument("store is " + describe(object) +
                          ", but must have set(key, bytes) and get(key), which returns bytes, or None while there are none; torch's stores do");
  }
  if (has("wait") && has("check")) return std::make_shared<TorchStore>(std::move(object));
  return std::make_shared<PolledStore>(std::move(object));
}

}  // namespace turnout::python
