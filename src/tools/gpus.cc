#include "tools/gpus.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "api/buffer_impl.h"
#include "transport/cuda.h"

namespace turnout::tools {

namespace {

/// "570.124.06": the first word of the kernel's file that begins like a version; empty where there is none.
std::string driver_version() {
  std::ifstream file("/proc/driver/nvidia/version");
  for (std::string word; file >> word;) {
    if (word.find_first_not_of("0123456789.") == std::string::npos && word.find('.') != std::string::npos) return word;
  }
  return "";
}

std::string model_of(const std::string& words) { return words.substr(0, words.find(" (")); }

}  // namespace

DeviceChoice device_from(const std::string& text) {
  if (text == "cpu") return {};
  if (text == "cuda") return {DeviceKind::cuda};
  const std::string prefix = "cuda:";
  if (text.starts_with(prefix)) {
    int index = -1;
    const auto [end, error] = std::from_chars(text.data() + prefix.size(), text.data() + text.size(), index);
    if (error == std::errc() && end == text.data() + text.size() && index >= 0) return {DeviceKind::cuda, index};
  }
  throw InvalidArgument("--device " + text + " is unknown: use cpu, cuda (rank r on GPU r modulo their number) or cuda:N");
}

DeviceChoice check_device(const std::string& text) {
  const DeviceChoice choice = device_from(text);
  if (choice.kind == DeviceKind::cpu) return choice;
  // Streams beyond this number share queues of the GPU, and ranks that share a queue would wait for each other for ever.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);  // NOLINT(concurrency-mt-unsafe)
  if (const std::string reason = transport::cuda_reason(); !reason.empty()) throw TransportError("--device " + text + ": " + reason);
  const int first = choice.index.value_or(0), last = choice.index.value_or(transport::num_cuda_devices() - 1);
  for (int device = first; device <= last; ++device) {
    if (const std::string reason = transport::cuda_device_reason(device); !reason.empty()) throw InvalidArgument("--device " + text + ": " + reason);
  }
  return choice;
}

void check_num_sms(const DeviceChoice& choice, int num_sms) {
  if (num_sms == 0) return;
  const std::string given = "--num-sms " + std::to_string(num_sms);
  if (choice.kind == DeviceKind::cpu) throw InvalidArgument(given + " needs --device cuda");
  const int have = transport::num_cuda_sms(choice.index.value_or(0));
  if (num_sms > have) throw InvalidArgument(given + ": the GPU has " + std::to_string(have) + " multiprocessors");
}

Device device_of(const DeviceChoice& choice, const Communicator& communicator) {
  if (choice.kind == DeviceKind::cpu) return {};
  return {DeviceKind::cuda, choice.index.value_or(communicator.local_rank() % std::max(1, transport::num_cuda_devices()))};
}

std::string Gpus::summary() const {
  if (words.empty()) return "";
  const std::string driver = driver_version();
  return std::to_string(words.size()) + " x " + model_of(words[0]) + (driver.empty() ? "" : ", driver " + driver);
}

Gpus gather_gpus(Communicator& communicator, Device device) {
  const bool on_gpu = device.kind == DeviceKind::cuda;
  const std::string mine = on_gpu ? transport::describe_cuda_device(device.index) : "";
  Gpus gpus;
  for (const auto& bytes : communicator.all_gather(std::as_bytes(std::span(mine.data(), mine.size())))) {
    const std::string words(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    if (words.empty()) continue;
    if (std::find(gpus.words.begin(), gpus.words.end(), words) == gpus.words.end()) gpus.words.push_back(words);
    else gpus.shared = true;
  }
  const int visible = on_gpu ? transport::num_cuda_devices() : 0;
  for (const std::string& words : gpus.words) {
    int ordinal = 0;
    while (ordinal < visible && transport::describe_cuda_device(ordinal) != words) ++ordinal;
    gpus.ordinals.push_back(ordinal < visible ? ordinal : -1);
  }
  return gpus;
}

std::string transport_of(const Buffer& buffer, const Communicator& communicator) {
  const engine::DeviceEngine* engine = buffer.impl()->device();
  return std::string(engine ? engine->transport() : communicator.transport());
}

std::optional<double> link_GBps(Communicator& communicator, const Gpus& gpus, const std::string& transport) {
  double rate = 0;
  const bool sees_all = std::find(gpus.ordinals.begin(), gpus.ordinals.end(), -1) == gpus.ordinals.end();
  if (communicator.rank() == 0 && !gpus.shared && gpus.words.size() > 1 && sees_all) {
    std::vector<transport::DeviceCopy> copies;
    for (size_t g = 0; g < gpus.ordinals.size(); ++g) {
      const int here = gpus.ordinals[g], next = gpus.ordinals[(g + 1) % gpus.ordinals.size()];
      if (transport == "cuda_host") copies.insert(copies.end(), {{here, transport::DeviceCopy::kHost}, {transport::DeviceCopy::kHost, here}});
      else copies.push_back({here, next});
    }
    try {
      rate = transport::copy_GBps(copies);
    } catch (const TransportError& error) {
      std::fprintf(stderr, "turnout: no limit is measured: %s\n", error.what());  // the other ranks wait for an answer
    }
  }
  const auto told = communicator.all_gather(std::as_bytes(std::span(&rate, 1)));
  std::memcpy(&rate, told[0].data(), sizeof rate);
  return rate > 0 ? std::optional(rate) : std::nullopt;
}

}  // namespace turnout::tools
