// Memory for the arrays of one object, given back all at once: its first part lies in the object itself, so that a small one
// needs no allocation. What a standard memory resource does through virtual calls is a few instructions here.
#pragma once
#include <algorithm>
#include <cstddef>
#include <new>
#include <type_traits>

namespace turnout::engine {

template <size_t kFirstBytes>
class Arena {
 public:
  Arena() {}  // not `= default`: making one would clear first_
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() {
    while (blocks_) {
      Block* const next = blocks_->next;
      ::operator delete(blocks_);
      blocks_ = next;
    }
  }

  /// Aligned to 16.
  void* allocate(size_t num_bytes) {
    const size_t bytes = (num_bytes + 15) / 16 * 16;
    if (bytes > left_) grow(bytes);
    void* const here = next_;
    next_ += bytes;
    left_ -= bytes;
    return here;
  }

 private:
  struct alignas(16) Block {
    Block* next;
  };
  /// What is left of the block before is lost: blocks double, or hold one large array.
  void grow(size_t bytes) {
    const size_t room = std::max(bytes, block_bytes_);
    block_bytes_ *= 2;
    auto* const memory = static_cast<std::byte*>(::operator new(sizeof(Block) + room));
    blocks_ = new (memory) Block{blocks_};
    next_ = memory + sizeof(Block);
    left_ = room;
  }

  std::byte* next_ = first_;
  size_t left_ = kFirstBytes, block_bytes_ = kFirstBytes;
  Block* blocks_ = nullptr;
  alignas(16) std::byte first_[kFirstBytes];
};

/// A vector of plain values in an arena, with the names of std::vector; what it grows out of stays in the arena.
template <class T, class Memory>
class ArenaVector {
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T> && alignof(T) <= 16);

 public:
  explicit ArenaVector(Memory* memory) : memory_(memory) {}
  ArenaVector(const ArenaVector&) = delete;
  ArenaVector& operator=(const ArenaVector&) = delete;

  /// New elements, if any, have any value.
  void resize_for_overwrite(size_t n) {
    reserve(n);
    size_ = n;
  }
  void resize(size_t n, T value = T()) {
    reserve(n);
    if (n > size_) std::fill_n(data_ + size_, n - size_, value);
    size_ = n;
  }
  void assign(size_t n, T value) {
    size_ = 0;
    resize(n, value);
  }

  T* data() { return data_; }
  const T* data() const { return data_; }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }
  const T& back() const { return data_[size_ - 1]; }
  T* begin() { return data_; }
  T* end() { return data_ + size_; }
  const T* begin() const { return data_; }
  const T* end() const { return data_ + size_; }

 private:
  void reserve(size_t n) {
    if (n <= capacity_) return;
    T* const more = static_cast<T*>(memory_->allocate(n * sizeof(T)));
    std::copy_n(data_, size_, more);
    data_ = more;
    capacity_ = n;
  }

  Memory* const memory_;
  T* data_ = nullptr;
  size_t size_ = 0, capacity_ = 0;
};

}  // namespace turnout::engine
