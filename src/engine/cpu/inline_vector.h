// A vector of plain values whose first few lie in the object itself: what a call keeps per rank needs no allocation where
// ranks are few.
#pragma once
#include <algorithm>
#include <cstddef>
#include <memory>
#include <type_traits>

namespace turnout::engine {

template <class T, size_t kInline>
class InlineVector {
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);

 public:
  InlineVector() = default;
  InlineVector(const InlineVector& other) { append(other.begin(), other.size_); }
  InlineVector& operator=(const InlineVector& other) {
    if (this == &other) return *this;
    size_ = 0;
    append(other.begin(), other.size_);
    return *this;
  }

  /// The elements have any value.
  void resize_for_overwrite(size_t n) {
    size_ = 0;
    reserve(n);
    size_ = n;
  }
  void assign(size_t n, T value) {
    resize_for_overwrite(n);
    if (more_) std::fill_n(more_.get(), n, value);
    else std::fill_n(few_, kInline, value);  // of a constant number: no loop
  }
  void push_back(T value) {
    if (size_ == capacity_) reserve(2 * capacity_);
    data()[size_++] = value;
  }
  /// Keeps nothing of what was there.
  void clear() { size_ = 0; }
  void append(const T* values, size_t n) {
    reserve(size_ + n);
    std::copy_n(values, n, data() + size_);
    size_ += n;
  }

  T* data() { return more_ ? more_.get() : few_; }
  const T* data() const { return more_ ? more_.get() : few_; }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T& operator[](size_t i) { return data()[i]; }
  const T& operator[](size_t i) const { return data()[i]; }
  T& back() { return data()[size_ - 1]; }
  const T& back() const { return data()[size_ - 1]; }
  T* begin() { return data(); }
  T* end() { return data() + size_; }
  const T* begin() const { return data(); }
  const T* end() const { return data() + size_; }

 private:
  void reserve(size_t n) {
    if (n <= capacity_) return;
    auto more = std::make_unique_for_overwrite<T[]>(n);
    std::copy_n(data(), size_, more.get());
    more_ = std::move(more);
    capacity_ = n;
  }

  size_t size_ = 0, capacity_ = kInline;
  std::unique_ptr<T[]> more_;
  T few_[kInline];
};

/// One value per rank; per pair of ranks; per side array.
template <class T>
using PerRank = InlineVector<T, 8>;
template <class T>
using PerPair = InlineVector<T, 16>;
template <class T>
using PerSide = InlineVector<T, 4>;

}  // namespace turnout::engine
