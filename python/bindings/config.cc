#include "bindings/config.h"

#include <string>

#include "bindings/arguments.h"

namespace turnout::python {

namespace {

/// A field: its name, and how it is read and told.
struct Field {
  const char* name;
  void (*read)(BufferConfig& config, nb::handle value, const char* name);
  nb::object (*tell)(const BufferConfig& config);
};

template <auto member>
void read_number(BufferConfig& config, nb::handle value, const char* name) {
  using T = std::remove_reference_t<decltype(config.*member)>;
  const int64_t least = std::is_unsigned_v<T> ? 0 : INT64_MIN;
  config.*member = static_cast<T>(sizeof(T) == sizeof(int) ? int_of(value, name) : integer_of(value, name, least));
}
template <auto member>
nb::object tell_number(const BufferConfig& config) {
  return nb::int_(config.*member);
}
template <auto member>
constexpr Field number(const char* name) {
  return {name, read_number<member>, tell_number<member>};
}

template <auto member>
constexpr Field ranks(const char* name) {
  return {name, [](BufferConfig& config, nb::handle value, const char* what) { config.*member = ints_of(value, what); },
          [](const BufferConfig& config) -> nb::object {
            nb::list list;
            for (const int entry : config.*member) list.append(entry);
            return list;
          }};
}

template <auto member>
constexpr Field seconds(const char* name) {
  return {name, [](BufferConfig& config, nb::handle value, const char* what) { config.timeouts.*member = duration_of(value, what); },
          [](const BufferConfig& config) -> nb::object { return nb::float_(static_cast<double>((config.timeouts.*member).count()) / 1000); }};
}

using C = BufferConfig;
constexpr Field kFields[] = {
    number<&C::num_experts>("num_experts"),
    number<&C::hidden>("hidden"),
    number<&C::max_tokens_per_rank>("max_tokens_per_rank"),
    {"dtype", [](C& config, nb::handle value, const char* what) { config.dtype = dtype_argument(value, what); },
     [](const C& config) -> nb::object { return nb::str(std::string(name(config.dtype)).c_str()); }},
    number<&C::max_topk>("max_topk"),
    number<&C::max_side_bytes>("max_side_bytes"),
    ranks<&C::expert_to_rank>("expert_to_rank"),
    ranks<&C::replica_of>("replica_of"),
    number<&C::num_lanes>("num_lanes"),
    number<&C::max_outstanding>("max_outstanding"),
    number<&C::receive_bytes>("receive_bytes"),
    number<&C::staging_bytes>("staging_bytes"),
    {"device", [](C& config, nb::handle value, const char* what) { config.device = device_of(value, what); },
     [](const C& config) -> nb::object {
       return nb::str(config.device.kind == DeviceKind::cpu ? "cpu" : ("cuda:" + std::to_string(config.device.index)).c_str());
     }},
    number<&C::num_threads>("num_threads"),
    seconds<&Timeouts::timeout>("timeout"),
    seconds<&Timeouts::busy_timeout>("busy_timeout"),
    seconds<&Timeouts::report_every>("report_every"),
    {"touch_pages", [](C& config, nb::handle value, const char*) { config.touch_pages = PyObject_IsTrue(value.ptr()) == 1; },
     [](const C& config) -> nb::object { return nb::bool_(config.touch_pages); }},
};

}  // namespace

BufferConfig config_of(nb::dict given) {
  BufferConfig config;
  for (const auto& [key, value] : given) {
    const std::string name = text_of(nb::handle(key));
    for (const Field& field : kFields) {
      if (name == field.name) field.read(config, value, ("Buffer: " + name).c_str());
    }
  }
  return config;
}

nb::dict to_python(const BufferConfig& config) {
  nb::dict fields;
  for (const Field& field : kFields) fields[field.name] = field.tell(config);
  return fields;
}

}  // namespace turnout::python
