// Memory that a step needs and the next one uses again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace kveik {

// A stretch of memory that only grows, on huge pages where it is large. What it held is lost when it grows.
class Buffer {
public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { std::free(bytes_); }

    void* reserve(size_t size) {
        if (size <= size_) return bytes_;
        std::free(bytes_);
        bytes_ = nullptr;
        size_ = 0;
        const size_t alignment = size >= huge ? huge : 64;
        const size_t rounded = (size + alignment - 1) / alignment * alignment;
        bytes_ = std::aligned_alloc(alignment, rounded);
        if (!bytes_) throw std::bad_alloc();
#if defined(__linux__)
        if (alignment == huge) madvise(bytes_, rounded, MADV_HUGEPAGE);
#endif
        size_ = rounded;
        return bytes_;
    }

    float* floats(size_t count) { return static_cast<float*>(reserve(count * sizeof(float))); }
    size_t size() const { return size_; }

private:
    static constexpr size_t huge = size_t(2) << 20;
    void* bytes_ = nullptr;
    size_t size_ = 0;
};

}  // namespace kveik
