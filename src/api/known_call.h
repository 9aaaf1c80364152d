// What one call of a lane learnt for the next: that arguments of such a description are good, and the facts that follow from it.
// Calls of a loop differ only in where their data lie and in what their ids say, and only that is looked at again.
#pragma once
#include <cstdint>
#include <optional>

#include "engine/cpu/context.h"
#include "engine/cpu/known_facts.h"
#include "engine/routing.h"
#include "turnout/buffer.h"

namespace turnout::api {

class KnownDispatch {
 public:
  /// The facts of the call, epoch left out. `experts`: of new routings. Throws InvalidArgument as check_dispatch(); ids may pass unchecked.
  const engine::KnownFacts& check(const engine::Context& context, const DispatchArgs& args, const core::ExpertMap& experts);

 private:
  bool is_like(const DispatchArgs& args, const core::ExpertMap& experts) const;

  bool is_there_ = false;
  TensorView x_, topk_idx_, topk_weights_, out_;  ///< without data
  Mode mode_{};
  Layout layout_{};
  std::optional<int64_t> capacity_;
  int expert_alignment_ = 1, num_sms_ = 0, lane_ = 0;
  Quantize quantize_{};
  ResultKind result_{};
  OnFailure on_failure_{};
  engine::KnownFacts facts_;
};

class KnownCombine {
 public:
  /// The facts of the call, epoch and handle left out. Throws InvalidArgument as check_combine().
  const engine::KnownFacts& check(const engine::Context& context, const CombineArgs& args);

 private:
  bool is_like(const engine::Context& context, const CombineArgs& args) const;

  bool is_there_ = false;
  TensorView y_, out_;  ///< without data
  CombineWeights apply_{};
  Wire wire_{};
  Mode mode_{};
  OnFailure on_failure_{};
  int num_sms_ = 0, lane_ = 0;
  // Of the handle's routing.
  Layout layout_{};
  int64_t capacity_ = -1, num_tokens_ = 0, num_rows_ = 0;
  int alignment_ = 1, num_topk_ = 0, num_local_ = 0;
  bool has_weights_ = false;
  engine::KnownFacts facts_;
};

}  // namespace turnout::api
