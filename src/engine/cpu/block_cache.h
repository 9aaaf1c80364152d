// An allocator for the few objects that every call makes and that are too large for malloc's quick lists: each thread keeps
// a handful of blocks that it freed.
#pragma once
#include <array>
#include <cstddef>
#include <new>

namespace turnout::engine {

/// Blocks of one size, kept by the thread that freed them.
template <size_t kBytes>
class BlockCache {
 public:
  static void* allocate() {
    Kept& k = kept();
    return k.count > 0 ? k.blocks[--k.count] : ::operator new(kBytes);
  }
  static void deallocate(void* block) noexcept {
    Kept& k = kept();
    if (k.count < k.most) k.blocks[k.count++] = block;
    else ::operator delete(block);
  }

 private:
  struct Kept {
    std::array<void*, 4> blocks{};
    size_t count = 0, most = 4;
    ~Kept() {
      // What is freed after the thread's end goes back at once.
      while (count > 0) ::operator delete(blocks[--count]);
      most = 0;
    }
  };
  static Kept& kept() {
    thread_local Kept mine;
    return mine;
  }
};

/// For std::allocate_shared.
template <class T>
struct CachedAllocator {
  using value_type = T;
  static constexpr size_t kBytes = (sizeof(T) + 63) / 64 * 64;
  static_assert(alignof(T) <= __STDCPP_DEFAULT_NEW_ALIGNMENT__);

  CachedAllocator() = default;
  template <class U>
  CachedAllocator(const CachedAllocator<U>&) {}
  T* allocate(size_t n) { return static_cast<T*>(n == 1 ? BlockCache<kBytes>::allocate() : ::operator new(n * sizeof(T))); }
  void deallocate(T* block, size_t n) noexcept {
    if (n == 1) BlockCache<kBytes>::deallocate(block);
    else ::operator delete(block);
  }
  template <class U>
  bool operator==(const CachedAllocator<U>&) const {
    return true;
  }
};

}  // namespace turnout::engine
