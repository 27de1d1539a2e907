//! Device memory: reservations, allocations and mappings, with CUDA's error codes for calls that are wrong.

#include "memory.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <map>
#include <mutex>

namespace emulated {
namespace {

constexpr int INVALID = 1, OUT_OF_MEMORY = 2;
constexpr const char* NAME = "emulated device";

struct Handle {
    int fd;
    size_t bytes;
    int device;
    unsigned holders;
    unsigned mappings;
    bool own;
};

struct Mapping {
    size_t bytes;
    uint64_t handle;
};

// Never destroyed: threads may still be at work when the process ends.
struct State {
    std::mutex lock;
    std::map<uint64_t, Handle> handles;
    std::map<uint64_t, Mapping> mappings;
    std::map<uint64_t, size_t> reservations;
    uint64_t next = 1, used = 0;
};
State& state = *new State();

void drop_unused(uint64_t number) {
    auto found = state.handles.find(number);
    if (found->second.holders == 0 && found->second.mappings == 0) {
        close(found->second.fd);
        state.used -= found->second.own ? found->second.bytes : 0;
        state.handles.erase(found);
    }
}

void* at(uint64_t address) { return reinterpret_cast<void*>(address); }

int add(uint64_t* handle, Handle made) {
    *handle = state.next++;
    state.handles[*handle] = made;
    state.used += made.own ? made.bytes : 0;
    return 0;
}

// Whether a descriptor is of memory that `create` made, in this or another process.
bool is_memory(int fd) {
    char link[64], name[64] = {};
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    return readlink(link, name, sizeof name - 1) > 0 && strstr(name, NAME) != nullptr;
}

}  // namespace

int reserve(uint64_t* base, size_t bytes, size_t align) {
    if (bytes == 0 || bytes % GRANULARITY != 0 || (align & (align - 1)) != 0) {
        return INVALID;
    }
    align = align < GRANULARITY ? GRANULARITY : align;
    void* whole = mmap(nullptr, bytes + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (whole == MAP_FAILED) {
        return OUT_OF_MEMORY;
    }
    const uint64_t start = reinterpret_cast<uint64_t>(whole), begin = (start + align - 1) / align * align;
    if (begin != start) {
        munmap(whole, begin - start);
    }
    munmap(at(begin + bytes), start + align - begin);
    std::lock_guard<std::mutex> held(state.lock);
    state.reservations[begin] = bytes;
    *base = begin;
    return 0;
}

int unreserve(uint64_t base, size_t bytes) {
    std::lock_guard<std::mutex> held(state.lock);
    auto found = state.reservations.find(base);
    auto mapping = state.mappings.lower_bound(base);
    if (found == state.reservations.end() || found->second != bytes ||
        (mapping != state.mappings.end() && mapping->first < base + bytes)) {
        return INVALID;
    }
    state.reservations.erase(found);
    return munmap(at(base), bytes) == 0 ? 0 : INVALID;
}

int create(uint64_t* handle, size_t bytes, int device) {
    if (bytes == 0 || bytes % GRANULARITY != 0) {
        return INVALID;
    }
    std::lock_guard<std::mutex> held(state.lock);
    if (bytes > TOTAL || state.used > TOTAL - bytes) {
        return OUT_OF_MEMORY;
    }
    const int fd = memfd_create(NAME, MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
        close(fd);
        return OUT_OF_MEMORY;
    }
    return add(handle, {fd, bytes, device, 1, 0, true});
}

int release(uint64_t handle) {
    std::lock_guard<std::mutex> held(state.lock);
    auto found = state.handles.find(handle);
    if (found == state.handles.end() || found->second.holders == 0) {
        return INVALID;
    }
    found->second.holders -= 1;
    drop_unused(handle);
    return 0;
}

int map(uint64_t address, size_t bytes, size_t offset, uint64_t handle) {
    std::lock_guard<std::mutex> held(state.lock);
    auto found = state.handles.find(handle);
    auto range = state.reservations.upper_bound(address);
    auto after = state.mappings.lower_bound(address);
    const bool reserved = range != state.reservations.begin() &&
                          (--range, address + bytes <= range->first + range->second);
    const bool taken = (after != state.mappings.end() && after->first < address + bytes) ||
                       (after != state.mappings.begin() &&
                        (--after, after->first + after->second.bytes > address));
    if (found == state.handles.end() || !reserved || taken || offset != 0 || bytes != found->second.bytes) {
        return INVALID;
    }
    // It cannot be accessed before `open_access`.
    if (mmap(at(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, found->second.fd, 0) == MAP_FAILED) {
        return OUT_OF_MEMORY;
    }
    found->second.mappings += 1;
    state.mappings[address] = {bytes, handle};
    return 0;
}

int unmap(uint64_t address, size_t bytes) {
    std::lock_guard<std::mutex> held(state.lock);
    auto found = state.mappings.find(address);
    if (found == state.mappings.end() || found->second.bytes != bytes) {
        return INVALID;
    }
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    if (mmap(at(address), bytes, PROT_NONE, flags, -1, 0) == MAP_FAILED) {
        return OUT_OF_MEMORY;
    }
    const uint64_t handle = found->second.handle;
    state.mappings.erase(found);
    state.handles[handle].mappings -= 1;
    drop_unused(handle);
    return 0;
}

int open_access(uint64_t address, size_t bytes) {
    std::lock_guard<std::mutex> held(state.lock);
    for (uint64_t here = address; here < address + bytes;) {
        auto found = state.mappings.find(here);
        if (found == state.mappings.end()) {
            return INVALID;
        }
        here += found->second.bytes;
    }
    return mprotect(at(address), bytes, PROT_READ | PROT_WRITE) == 0 ? 0 : INVALID;
}

int export_fd(int* fd, uint64_t handle) {
    std::lock_guard<std::mutex> held(state.lock);
    auto found = state.handles.find(handle);
    *fd = found == state.handles.end() ? -1 : fcntl(found->second.fd, F_DUPFD_CLOEXEC, 0);
    return *fd < 0 ? INVALID : 0;
}

int import_fd(uint64_t* handle, int fd) {
    struct stat status;
    const int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (own < 0 || fstat(own, &status) != 0 || !is_memory(own)) {
        close(own);
        return INVALID;
    }
    std::lock_guard<std::mutex> held(state.lock);
    return add(handle, {own, static_cast<size_t>(status.st_size), 0, 1, 0, false});
}

int device_of(int* device, uint64_t handle) {
    std::lock_guard<std::mutex> held(state.lock);
    auto found = state.handles.find(handle);
    if (found == state.handles.end()) {
        return INVALID;
    }
    *device = found->second.device;
    return 0;
}

uint64_t used() {
    std::lock_guard<std::mutex> held(state.lock);
    return state.used;
}

}  // namespace emulated
