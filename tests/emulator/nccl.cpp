//! NCCL's functions, as far as transfers between hosts need them, for emulated devices. Ranks are processes or threads of one
//! machine, and their bytes go through a file in memory.
//!
//! `FAKE_NCCL` has the faults of a process, with commas between them: `version=22703`, `init=hangs`, `init=blocks`,
//! `transfer=fails`, `transfer=hangs`, `abort=blocks`. The faults of transfers and aborts begin when `fakeNcclFaults` is called.

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace {

enum : int { OK = 0, UNHANDLED = 1, SYSTEM = 2, INVALID = 4, REMOTE = 6, IN_PROGRESS = 7 };

constexpr size_t RING = 64 << 10;
constexpr int MAX_RANKS = 64;

// Bytes on their way from one rank to another.
struct Ring {
    std::atomic<size_t> written, read;
    char data[RING];
};

// Memory that the ranks of a communicator share.
struct Shared {
    std::atomic<int> attached;
    std::atomic<bool> aborted[MAX_RANKS];
    Ring rings[];
};

struct Part {
    char* at;
    size_t bytes;
    int peer;

    // Goes on behind so many bytes. Whether that was all.
    bool moved(size_t some) {
        at += some;
        bytes -= some;
        return bytes == 0;
    }
};

// Transfers that run together, as one kernel would.
struct Kernel {
    struct Comm* comm;
    std::vector<Part> sent, received;
    bool hangs = false;
};

struct Comm {
    Shared* shared;
    size_t length;
    std::string path;
    int rank, world;
    bool hangs = false;
    std::atomic<bool> aborts{false};
    std::atomic<int> kernels{0};
    std::atomic<int> error{OK};

    Ring& ring(int from, int to) { return shared->rings[from * world + to]; }
};

std::atomic<bool> faulty{false};

bool has_fault(const char* fault) {
    const char* all = getenv("FAKE_NCCL");
    return all != nullptr && strstr(all, fault) != nullptr;
}

void breathe() { std::this_thread::sleep_for(std::chrono::microseconds(20)); }

// Calls `copy(in_ring, done, some)` for the pieces of a ring from position `at` on, of which one ends where the ring does.
template <typename Copy>
void each_piece(size_t at, size_t bytes, Copy copy) {
    for (size_t done = 0; done < bytes;) {
        const size_t in_ring = (at + done) % RING, some = std::min(bytes - done, RING - in_ring);
        copy(in_ring, done, some);
        done += some;
    }
}

// Moves what fits into the ring. Whether that was all.
bool push(Ring& ring, Part& part) {
    const size_t written = ring.written.load(std::memory_order_relaxed);
    const size_t room = RING - (written - ring.read.load(std::memory_order_acquire));
    const size_t bytes = std::min(room, part.bytes);
    each_piece(written, bytes, [&](size_t in_ring, size_t done, size_t some) {
        memcpy(ring.data + in_ring, part.at + done, some);
    });
    ring.written.store(written + bytes, std::memory_order_release);
    return part.moved(bytes);
}

// Moves what there is out of the ring. Whether that was all.
bool pull(Ring& ring, Part& part) {
    const size_t read = ring.read.load(std::memory_order_relaxed);
    const size_t there = ring.written.load(std::memory_order_acquire) - read;
    const size_t bytes = std::min(there, part.bytes);
    each_piece(read, bytes, [&](size_t in_ring, size_t done, size_t some) {
        memcpy(part.at + done, ring.data + in_ring, some);
    });
    ring.read.store(read + bytes, std::memory_order_release);
    return part.moved(bytes);
}

void run(void* raw) {
    Kernel* kernel = static_cast<Kernel*>(raw);
    Comm& comm = *kernel->comm;
    bool done = false;
    while (!done && !comm.aborts) {
        done = !kernel->hangs;
        if (!kernel->hangs) {
            for (Part& part : kernel->sent) {
                done &= push(comm.ring(comm.rank, part.peer), part);
            }
            for (Part& part : kernel->received) {
                done &= pull(comm.ring(part.peer, comm.rank), part);
            }
        }
        if (!done) {
            breathe();
        }
    }
    delete kernel;
    comm.kernels--;
}

using Launch = int (*)(void*, void (*)(void*), void*);

int launch(Kernel* kernel, void* stream) {
    static const Launch launch_host = reinterpret_cast<Launch>(dlsym(RTLD_DEFAULT, "cuLaunchHostFunc"));
    static const Launch launch_loaded = [] {
        void* driver = dlopen("libcuda.so.1", RTLD_NOW);
        return driver == nullptr ? nullptr : reinterpret_cast<Launch>(dlsym(driver, "cuLaunchHostFunc"));
    }();
    const Launch found = launch_host != nullptr ? launch_host : launch_loaded;
    if (found == nullptr) {
        return UNHANDLED;
    }
    kernel->comm->kernels++;
    return found(stream, run, kernel) == 0 ? OK : UNHANDLED;
}

// The group under way on this thread.
thread_local int depth = 0;
thread_local std::map<std::pair<Comm*, void*>, Kernel*> group;

int put(Comm* comm, void* stream, std::vector<Part> sent, std::vector<Part> received) {
    if (comm == nullptr || comm->aborts) {
        return INVALID;
    }
    if (faulty && has_fault("transfer=fails")) {
        comm->error = SYSTEM;
        return OK;
    }
    Kernel*& kernel = group[{comm, stream}];
    if (kernel == nullptr) {
        kernel = new Kernel{comm, {}, {}};
    }
    kernel->hangs = faulty && has_fault("transfer=hangs");
    kernel->sent.insert(kernel->sent.end(), sent.begin(), sent.end());
    kernel->received.insert(kernel->received.end(), received.begin(), received.end());
    if (depth > 0) {
        return OK;
    }
    Kernel* alone = kernel;
    group.clear();
    return launch(alone, stream);
}

Comm* of(void* raw) { return static_cast<Comm*>(raw); }

void detach(Comm* comm) {
    unlink(comm->path.c_str());
    while (comm->kernels > 0) {
        breathe();
    }
    munmap(comm->shared, comm->length);
    delete comm;
}

}  // namespace

extern "C" {

struct Id {
    char text[128];
};
// Beginning of `ncclConfig_t`.
struct Config {
    size_t size;
    unsigned magic, version;
    int blocking;
};

void fakeNcclFaults() { faulty = true; }

int ncclGetVersion(int* version) {
    const char* said = getenv("FAKE_NCCL");
    const char* found = said == nullptr ? nullptr : strstr(said, "version=");
    return *version = found == nullptr ? 22809 : atoi(found + strlen("version=")), OK;
}

int ncclGetUniqueId(Id* id) {
    static std::atomic<int> made{0};
    memset(id, 0, sizeof *id);
    const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
    snprintf(id->text, sizeof id->text, "/dev/shm/fake-nccl-%d-%d-%lld", getpid(), made++, (long long)now);
    return OK;
}

int ncclCommInitRankConfig(void** out, int world, Id id, int rank, const Config* config) {
    if (world < 1 || world > MAX_RANKS || rank < 0 || rank >= world || config->magic != 0xcafebeef ||
        config->size < sizeof(Config) || config->blocking != 0) {
        return INVALID;
    }
    while (has_fault("init=blocks")) {
        breathe();
    }
    Comm* comm = new Comm{};
    comm->path = id.text;
    comm->rank = rank;
    comm->world = world;
    comm->hangs = has_fault("init=hangs");
    comm->length = sizeof(Shared) + sizeof(Ring) * world * world;
    const int file = open(id.text, O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, comm->length) != 0) {
        delete comm;
        return SYSTEM;
    }
    void* at = mmap(nullptr, comm->length, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (at == MAP_FAILED) {
        delete comm;
        return SYSTEM;
    }
    comm->shared = static_cast<Shared*>(at);
    if (!comm->hangs && ++comm->shared->attached == world) {
        unlink(id.text);
    }
    *out = comm;
    return IN_PROGRESS;
}

int ncclCommGetAsyncError(void* raw, int* out) {
    Comm& comm = *of(raw);
    *out = comm.error;
    if (*out == OK && (comm.hangs || comm.shared->attached < comm.world)) {
        *out = IN_PROGRESS;
    }
    for (int rank = 0; *out == OK && rank < comm.world; ++rank) {
        if (comm.shared->aborted[rank]) {
            *out = REMOTE;
        }
    }
    return OK;
}

int ncclCommFinalize(void*) { return IN_PROGRESS; }

int ncclCommDestroy(void* raw) { return detach(of(raw)), OK; }

int ncclCommAbort(void* raw) {
    Comm* comm = of(raw);
    comm->shared->aborted[comm->rank] = true;
    while (faulty && has_fault("abort=blocks")) {
        breathe();
    }
    comm->aborts = true;
    return detach(comm), OK;
}

int ncclGroupStart() { return ++depth, OK; }

int ncclGroupEnd() {
    if (depth < 1) {
        return INVALID;
    }
    if (--depth > 0) {
        return OK;
    }
    auto begun = std::move(group);
    group.clear();
    int code = OK;
    for (auto& [where, kernel] : begun) {
        const int launched = launch(kernel, where.second);
        code = code == OK ? launched : code;
    }
    return code != OK ? code : IN_PROGRESS;
}

int ncclSend(const void* from, size_t bytes, int, int peer, void* comm, void* stream) {
    return put(of(comm), stream, {{static_cast<char*>(const_cast<void*>(from)), bytes, peer}}, {});
}

int ncclRecv(void* to, size_t bytes, int, int peer, void* comm, void* stream) {
    return put(of(comm), stream, {}, {{static_cast<char*>(to), bytes, peer}});
}

int ncclAllGather(const void* from, void* to, size_t bytes, int, void* raw, void* stream) {
    std::vector<Part> sent, received;
    for (int peer = 0; peer < of(raw)->world; ++peer) {
        sent.push_back({static_cast<char*>(const_cast<void*>(from)), bytes, peer});
        received.push_back({static_cast<char*>(to) + peer * bytes, bytes, peer});
    }
    return put(of(raw), stream, sent, received);
}

#ifndef WITHOUT_BROADCAST
int ncclBroadcast(const void* from, void* to, size_t bytes, int, int root, void* raw, void* stream) {
    std::vector<Part> sent, received;
    for (int peer = 0; of(raw)->rank == root && peer < of(raw)->world; ++peer) {
        if (peer != root || from != to) {
            sent.push_back({static_cast<char*>(const_cast<void*>(from)), bytes, peer});
        }
    }
    if (of(raw)->rank != root || from != to) {
        received.push_back({static_cast<char*>(to), bytes, root});
    }
    return put(of(raw), stream, sent, received);
}
#endif

const char* ncclGetErrorString(int code) {
    return code == REMOTE ? "remote process exited or there was a network error"
           : code == SYSTEM ? "unhandled system error"
                            : "some error";
}

const char* ncclGetLastError(void*) { return ""; }

}  // extern "C"
