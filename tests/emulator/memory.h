//! Device memory: files of anonymous memory, which other processes may map as well.

#pragma once

#include <stddef.h>
#include <stdint.h>

namespace emulated {

constexpr size_t GRANULARITY = 2 << 20;
constexpr uint64_t TOTAL = 64ull << 30;

// Each function returns a CUresult.
int reserve(uint64_t* base, size_t bytes, size_t align);
int unreserve(uint64_t base, size_t bytes);
int create(uint64_t* handle, size_t bytes, int device);
int release(uint64_t handle);
int map(uint64_t address, size_t bytes, size_t offset, uint64_t handle);
int unmap(uint64_t address, size_t bytes);
int open_access(uint64_t address, size_t bytes);
int export_fd(int* fd, uint64_t handle);
int import_fd(uint64_t* handle, int fd);
int device_of(int* device, uint64_t handle);
uint64_t used();

}  // namespace emulated
