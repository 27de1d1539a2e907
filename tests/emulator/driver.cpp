//! The functions of the CUDA driver library that symmpool and its programs call.

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "memory.h"
#include "programs.h"
#include "streams.h"

using namespace emulated;

namespace {

constexpr size_t PAGE = 4096;

enum : int {
    OK = 0,
    INVALID = 1,
    OUT_OF_MEMORY = 2,
    INVALID_IMAGE = 200,
    NOT_FOUND = 500,
    NOT_READY = 600,
    LAUNCH_OUT_OF_RESOURCES = 701,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_MERGE = 902,
    CAPTURE_ISOLATION = 905,
    CAPTURED_EVENT = 907,
};

int from_environment(const char* name, int usual) {
    const char* said = getenv(name);
    const int number = said == nullptr ? usual : atoi(said);
    return number > 0 ? number : usual;
}

// Devices of the machine, and the processors of each.
const int devices = from_environment("EMULATED_DEVICES", 8);
const int processors = from_environment("EMULATED_PROCESSORS", 4);
// Most resident blocks of a processor: as few as on the devices that have the fewest.
const int processor_blocks = from_environment("EMULATED_BLOCKS", 16);

thread_local std::vector<size_t> contexts;

// A slow device: the next call of a kind on it stops until the test that requested that releases it. Other calls are
// not stopped.
enum Kind : int { MAP = 0, SYNCHRONIZE = 1, KINDS = 2 };
struct Stop {
    std::mutex lock;
    std::condition_variable changed;
    int device = -1;  // the one whose next call stops
    int stopped = 0;
};
Stop& stop_of(int kind) {
    // Never destroyed: threads may still be at work when the process ends.
    static Stop* const stops = new Stop[KINDS];
    return stops[kind];
}

void stop_if_asked(Kind kind) {
    Stop& stop = stop_of(kind);
    std::unique_lock<std::mutex> held(stop.lock);
    if (stop.device < 0 || contexts.empty() || contexts.back() != static_cast<size_t>(stop.device) + 1) {
        return;
    }
    stop.device = -1;
    stop.stopped += 1;
    stop.changed.wait(held, [&] { return stop.stopped == 0; });
}

// A device without resources: a call of a kind that fails, counted from the request on.
enum Failing : int { LAUNCH = 0, LOAD = 1, COPY = 2, MEMORY_OPERATION = 3, CREATE = 4, MAPPING = 5, FAILING = 6 };
std::atomic<int> calls_of[FAILING], failing[FAILING];

bool fails(Failing kind) { return ++calls_of[kind] == failing[kind]; }

// The blocks and threads of kernels that were put on streams, since a test asked for them.
std::mutex launched_lock;
std::vector<Shape> launched;
void note_launch(Shape shape) {
    const std::lock_guard<std::mutex> held(launched_lock);
    // Nobody asks in most programs.
    if (launched.size() < 4096) {
        launched.push_back(shape);
    }
}

Stream* known(void* handle) { return stream_of(handle); }

template <typename F>
int on(void* handle, F&& then) {
    Stream* stream = known(handle);
    return stream == nullptr ? INVALID : (then(stream), OK);
}

int code_of(Crossing crossing) {
    switch (crossing) {
        case Crossing::NONE: return OK;
        case Crossing::ISOLATION: return CAPTURE_ISOLATION;
        case Crossing::MERGE: return CAPTURE_MERGE;
        case Crossing::CAPTURED: return CAPTURED_EVENT;
        case Crossing::ENDED: return INVALID;
    }
    return INVALID;
}

// The members of CUlaunchConfig that are read.
struct LaunchConfig {
    unsigned grid[3], block[3], shared;
    void* stream;
    void* attributes;
    unsigned attribute_count;
};

struct Module {
    void* library;  // null for PTX
};

// Each library is opened once and stays open, as modules are loaded and unloaded with communicators.
void* library_of(const std::string& code) {
    static std::mutex lock;
    static std::map<std::string, void*> libraries;
    const std::lock_guard held(lock);
    void*& library = libraries[code];
    if (library != nullptr) {
        return library;
    }
    const int fd = memfd_create("emulated kernel", MFD_CLOEXEC);
    const char* from = code.data();
    for (size_t left = code.size(); left != 0;) {
        const ssize_t written = write(fd, from, left);
        if (written <= 0) {
            return close(fd), nullptr;
        }
        from += written, left -= static_cast<size_t>(written);
    }
    char name[64];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    // The descriptor stays open: if its number were used again, dlopen would take the new file for this library.
    library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        fprintf(stderr, "emulated device: %s\n", dlerror());
    }
    return library;
}

int put_kernel(void* stream, Packer pack, Shape shape, void** parameters) {
    if (fails(LAUNCH)) {
        return LAUNCH_OUT_OF_RESOURCES;
    }
    if (shape.blocks == 0 || shape.threads == 0 || shape.threads > 1024) {
        return INVALID;
    }
    const Call call = pack(parameters);
    if (shape.blocks % call.cluster != 0) {
        return call.drop(call.arguments), INVALID;
    }
    note_launch(shape);
    return on(stream, [&](Stream* to) {
        // A graph's kernel runs again and again, so its arguments are kept.
        const bool again = is_capturing(to);
        put(to, [call, shape, again] {
            run_kernel(call, shape, static_cast<unsigned>(processors * PROCESSOR_THREADS),
                       static_cast<unsigned>(processors * processor_blocks));
            if (!again) {
                call.drop(call.arguments);
            }
        });
    });
}

}  // namespace

extern "C" {

// For tests: makes the next call of a kind on a device stop; with device -1, releases all calls that have stopped.
// Returns how many had stopped.
int emulatedStop(int kind, int device) {
    Stop& stop = stop_of(kind);
    std::lock_guard<std::mutex> held(stop.lock);
    const int stopped = stop.stopped;
    stop.device = device;
    if (device < 0) {
        stop.stopped = 0;
        stop.changed.notify_all();
    }
    return stopped;
}
int emulatedStopped(int kind) {
    Stop& stop = stop_of(kind);
    std::lock_guard<std::mutex> held(stop.lock);
    return stop.stopped;
}

// For tests: of the calls of a kind from now on the one of that number fails; none if it is 0. Returns how many there
// were since the last request.
int emulatedFail(int kind, int nth) {
    failing[kind] = nth;
    return calls_of[kind].exchange(0);
}

// For tests: the blocks and threads of the kernels that were put on streams since the last request, pair by pair, as far as
// there is room for so many kernels. Returns how many there were.
int emulatedLaunched(unsigned* pairs, int room) {
    const std::lock_guard<std::mutex> held(launched_lock);
    for (int nth = 0; nth < room && nth < static_cast<int>(launched.size()); ++nth) {
        pairs[2 * nth] = launched[static_cast<size_t>(nth)].blocks;
        pairs[2 * nth + 1] = launched[static_cast<size_t>(nth)].threads;
    }
    const int count = static_cast<int>(launched.size());
    launched.clear();
    return count;
}

int cuInit(unsigned) { return OK; }
int cuDriverGetVersion(int* version) { return *version = 13000, OK; }

int cuGetErrorName(int code, const char** name) {
    switch (code) {
        case OK: *name = "CUDA_SUCCESS"; break;
        case INVALID: *name = "CUDA_ERROR_INVALID_VALUE"; break;
        case OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; break;
        case LAUNCH_OUT_OF_RESOURCES: *name = "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"; break;
        case NOT_SUPPORTED: *name = "CUDA_ERROR_NOT_SUPPORTED"; break;
        case CAPTURE_UNSUPPORTED: *name = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"; break;
        case CAPTURE_ISOLATION: *name = "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"; break;
        default: *name = "CUDA_ERROR_OF_THE_EMULATION"; break;
    }
    return OK;
}
int cuGetErrorString(int, const char** text) { return *text = "of an emulated device", OK; }

int cuDeviceGetCount(int* count) { return *count = devices, OK; }
int cuDeviceGet(int* device, int ordinal) {
    return ordinal < 0 || ordinal >= devices ? INVALID : (*device = ordinal, OK);
}
int cuDeviceGetName(char* name, int length, int) {
    return snprintf(name, static_cast<size_t>(length), "emulated device"), OK;
}
int cuDeviceGetUuid_v2(unsigned char* uuid, int device) {
    memcpy(uuid, "emulated device", 16);
    uuid[15] = static_cast<unsigned char>(device);
    return OK;
}
int cuDeviceGetAttribute(int* value, int which, int) {
    switch (which) {
        case 1: *value = 1024; break;         // MAX_THREADS_PER_BLOCK
        case 16: *value = processors; break;  // MULTIPROCESSOR_COUNT
        case 40: *value = 2; break;           // ASYNC_ENGINE_COUNT
        case 75: *value = 9; break;           // COMPUTE_CAPABILITY_MAJOR
        case 102:                             // VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        case 103: *value = 1; break;          // HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
        default: *value = 0; break;
    }
    return OK;
}
int cuDeviceCanAccessPeer(int* can, int device, int peer) { return *can = device != peer, OK; }

int cuDevicePrimaryCtxRetain(size_t* context, int device) {
    return *context = static_cast<size_t>(device) + 1, OK;
}
int cuDevicePrimaryCtxRelease_v2(int) { return OK; }
int cuDevicePrimaryCtxRelease(int) { return OK; }
int cuCtxGetCurrent(size_t* context) { return *context = contexts.empty() ? 0 : contexts.back(), OK; }
int cuCtxSetCurrent(size_t context) {
    if (!contexts.empty()) {
        contexts.pop_back();
    }
    contexts.push_back(context);
    return OK;
}
int cuCtxPushCurrent_v2(size_t context) { return contexts.push_back(context), OK; }
int cuCtxPopCurrent_v2(size_t* context) {
    if (contexts.empty()) {
        return INVALID;
    }
    *context = contexts.back();
    contexts.pop_back();
    return OK;
}
// This thread's capture mode: global, or relaxed while it does what would disturb a capture otherwise.
thread_local unsigned capture_mode = 0;
constexpr unsigned GLOBAL_MODE = 0, RELAXED_MODE = 2;
// Whether a call that may be unsafe during captures ends one in an error, and fails.
static bool disturbs_captures() { return capture_mode != RELAXED_MODE && spoil_global_captures(); }
int cuCtxSynchronize() {
    if (disturbs_captures()) {
        return CAPTURE_UNSUPPORTED;
    }
    stop_if_asked(SYNCHRONIZE);
    return synchronize_all(), OK;
}
int cuThreadExchangeStreamCaptureMode(unsigned* mode) { return std::swap(*mode, capture_mode), OK; }

int cuMemGetInfo_v2(size_t* left, size_t* total) { return *total = TOTAL, *left = TOTAL - used(), OK; }
int cuMemGetAllocationGranularity(size_t* bytes, const void*, unsigned) { return *bytes = GRANULARITY, OK; }
int cuMemAddressReserve(uint64_t* base, size_t bytes, size_t align, uint64_t, unsigned long long) {
    return reserve(base, bytes, align);
}
int cuMemAddressFree(uint64_t base, size_t bytes) { return unreserve(base, bytes); }
int cuMemCreate(uint64_t* handle, size_t bytes, const int* properties, unsigned long long) {
    if (disturbs_captures()) {
        return CAPTURE_UNSUPPORTED;
    }
    return fails(CREATE) ? OUT_OF_MEMORY : create(handle, bytes, properties[3]);
}
int cuMemRelease(uint64_t handle) { return release(handle); }
int cuMemMap(uint64_t address, size_t bytes, size_t offset, uint64_t handle, unsigned long long) {
    if (disturbs_captures()) {
        return CAPTURE_UNSUPPORTED;
    }
    stop_if_asked(MAP);
    return fails(MAPPING) ? OUT_OF_MEMORY : map(address, bytes, offset, handle);
}
int cuMemUnmap(uint64_t address, size_t bytes) {
    if (disturbs_captures()) {
        return CAPTURE_UNSUPPORTED;
    }
    // On a device, unmapping memory waits for the work under way.
    synchronize_all();
    return unmap(address, bytes);
}
int cuMemSetAccess(uint64_t address, size_t bytes, const void*, size_t) {
    return disturbs_captures() ? CAPTURE_UNSUPPORTED : open_access(address, bytes);
}
int cuMemExportToShareableHandle(int* fd, uint64_t handle, unsigned kind, unsigned long long) {
    return kind == 1 ? export_fd(fd, handle) : NOT_SUPPORTED;
}
int cuMemImportFromShareableHandle(uint64_t* handle, void* fd, unsigned kind) {
    return kind == 1 ? import_fd(handle, static_cast<int>(reinterpret_cast<size_t>(fd))) : NOT_SUPPORTED;
}
int cuMemGetAllocationPropertiesFromHandle(int* properties, uint64_t handle) {
    properties[0] = 1, properties[1] = 1, properties[2] = 1;
    return device_of(&properties[3], handle);
}

int cuMemcpyHtoD_v2(uint64_t to, const void* from, size_t bytes) {
    return run_in_order([=] { memcpy(reinterpret_cast<void*>(to), from, bytes); }), OK;
}
int cuMemcpyDtoH_v2(void* to, uint64_t from, size_t bytes) {
    return run_in_order([=] { memcpy(to, reinterpret_cast<void*>(from), bytes); }), OK;
}
static void fill_words(uint64_t to, unsigned value, size_t words) {
    size_t done = 0;
    if (value == 0 && to % PAGE == 0) {
        // Pages are given back, which makes them zeros, so that those that nothing uses take no time.
        const size_t bytes = words * 4 / PAGE * PAGE;
        done = madvise(reinterpret_cast<void*>(to), bytes, MADV_REMOVE) == 0 ? bytes / 4 : 0;
    }
    if (value == (value & 0xff) * 0x01010101) {
        memset(reinterpret_cast<unsigned*>(to) + done, value & 0xff, (words - done) * 4);
        return;
    }
    for (size_t i = done; i < words; ++i) {
        reinterpret_cast<unsigned*>(to)[i] = value;
    }
}

int cuMemsetD32_v2(uint64_t to, unsigned value, size_t words) {
    return run_in_order([=] { fill_words(to, value, words); }), OK;
}
int cuMemsetD32Async(uint64_t to, unsigned value, size_t words, void* stream) {
    return on(stream, [=](Stream* s) { put(s, [=] { fill_words(to, value, words); }); });
}
int cuMemsetD8Async(uint64_t to, unsigned char value, size_t bytes, void* stream) {
    return on(stream, [=](Stream* s) {
        put(s, [=] { memset(reinterpret_cast<void*>(to), value, bytes); });
    });
}
// A word is written once, as copy engines do: it may be a flag, which its reader clears. (The C library's memcpy stores
// four bytes twice.)
static void copy_on_device(uint64_t to, uint64_t from, size_t bytes) {
    if (bytes == 4 && to % 4 == 0 && from % 4 == 0) {
        const unsigned word = reinterpret_cast<std::atomic<unsigned>*>(from)->load();
        reinterpret_cast<std::atomic<unsigned>*>(to)->store(word);
        return;
    }
    memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes);
}

int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void* stream) {
    if (fails(COPY)) {
        return OUT_OF_MEMORY;
    }
    return on(stream, [=](Stream* s) { put(s, [=] { copy_on_device(to, from, bytes); }); });
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void* stream) {
    // Memory that is not pinned may be reused as soon as this returns, so it is copied now.
    const std::string kept(static_cast<const char*>(from), bytes);
    return on(stream, [&](Stream* s) {
        put(s, [=] { memcpy(reinterpret_cast<void*>(to), kept.data(), bytes); });
    });
}
int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void* stream) {
    return on(stream, [=](Stream* s) {
        put(s, [=] { memcpy(to, reinterpret_cast<void*>(from), bytes); });
        if (!is_capturing(s)) {
            synchronize(s);
        }
    });
}
// Pinned memory has pages of its own, so that work of a device that comes too late ends the process.
static std::mutex pinned_lock;
static std::map<void*, size_t>& pinned = *new std::map<void*, size_t>();
int cuMemHostAlloc(void** to, size_t bytes, unsigned) {
    *to = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*to == MAP_FAILED) {
        return *to = nullptr, OUT_OF_MEMORY;
    }
    const std::lock_guard<std::mutex> held(pinned_lock);
    pinned[*to] = bytes;
    return OK;
}
int cuMemFreeHost(void* memory) {
    const std::lock_guard<std::mutex> held(pinned_lock);
    const auto found = pinned.find(memory);
    if (found == pinned.end()) {
        return INVALID;
    }
    // Its addresses are never used again.
    mprotect(memory, found->second, PROT_NONE);
    madvise(memory, found->second, MADV_DONTNEED);
    pinned.erase(found);
    return OK;
}
int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
    void* memory = nullptr;
    const int code = cuMemHostAlloc(&memory, bytes, 0);
    return *address = reinterpret_cast<uint64_t>(memory), code;
}
int cuMemFree_v2(uint64_t address) { return cuMemFreeHost(reinterpret_cast<void*>(address)); }

int cuStreamCreate(void** stream, unsigned flags) { return *stream = new_stream((flags & 1) == 0), OK; }
// The members of CUstreamBatchMemOpParams that are read.
struct MemoryOperation {
    unsigned operation;  // 1: wait, 2: write
    uint64_t address;
    uint64_t value;
    unsigned flags;
    uint64_t alias, unused;
};
int cuStreamBatchMemOp_v2(void* handle, unsigned count, const MemoryOperation* given, unsigned) {
    if (fails(MEMORY_OPERATION)) {
        return OUT_OF_MEMORY;
    }
    const std::vector<MemoryOperation> all(given, given + count);
    for (const MemoryOperation& each : all) {
        // Waits are for equal values.
        if (each.operation != 2 && !(each.operation == 1 && each.flags == 1)) {
            return NOT_SUPPORTED;
        }
    }
    return on(handle, [&](Stream* stream) {
        put(stream, [all] {
            be_late_by_chance();
            for (const MemoryOperation& each : all) {
                auto* word = reinterpret_cast<std::atomic<unsigned>*>(each.address);
                const unsigned value = static_cast<unsigned>(each.value);
                if (each.operation == 2) {
                    word->store(value);
                    continue;
                }
                while (word->load() != value) {
                    const timespec moment = {0, 20000};
                    nanosleep(&moment, nullptr);
                }
            }
        });
    });
}
int cuStreamDestroy_v2(void* handle) { return on(handle, drop_stream); }
int cuStreamDestroy(void* handle) { return cuStreamDestroy_v2(handle); }
// A capture in which somebody asks how far its stream is ends in an error.
int cuStreamSynchronize(void* handle) {
    bool captured = false;
    const int code = on(handle, [&](Stream* stream) {
        captured = spoil_capture(stream);
        if (!captured) {
            synchronize(stream);
        }
    });
    return captured ? CAPTURE_UNSUPPORTED : code;
}
int cuStreamQuery(void* handle) {
    bool idle = false, captured = false;
    const int code = on(handle, [&](Stream* stream) {
        captured = spoil_capture(stream) || disturbs_captures();
        idle = is_idle(stream);
    });
    return captured ? CAPTURE_UNSUPPORTED : code != OK || idle ? code : NOT_READY;
}
int cuStreamIsCapturing(void* handle, unsigned* capturing) {
    return on(handle, [=](Stream* stream) { *capturing = is_capturing(stream); });
}
int cuStreamGetCaptureInfo_v2(void* handle, unsigned* status, unsigned long long* id, void*, void*, void*) {
    return on(handle, [=](Stream* stream) {
        *id = capture_of(stream);
        *status = *id != 0;
    });
}
int cuStreamWaitEvent(void* handle, Event* event, unsigned) {
    Stream* stream = known(handle);
    return stream == nullptr ? INVALID : code_of(wait(stream, event));
}
int cuLaunchHostFunc(void* handle, void (*work)(void*), void* data) {
    return on(handle, [=](Stream* stream) { put(stream, [=] { work(data); }); });
}
int cuStreamBeginCapture_v2(void* handle, unsigned mode) {
    Stream* stream = known(handle);
    return stream != nullptr && begin_capture(stream, mode == GLOBAL_MODE) ? OK : CAPTURE_UNSUPPORTED;
}
int cuStreamEndCapture(void* handle, Graph** graph) {
    Stream* stream = known(handle);
    *graph = stream == nullptr ? nullptr : end_capture(stream);
    return *graph == nullptr ? CAPTURE_UNSUPPORTED : OK;
}

int cuGraphInstantiateWithFlags(Graph** ready, Graph* graph, unsigned long long) {
    return *ready = copy(graph), OK;
}
int cuGraphInstantiate(Graph** ready, Graph* graph, unsigned long long) { return *ready = copy(graph), OK; }
int cuGraphDestroy(Graph* graph) { return drop_graph(graph), OK; }
int cuGraphExecDestroy(Graph* graph) { return drop_graph(graph), OK; }
int cuGraphLaunch(Graph* graph, void* handle) {
    return on(handle, [=](Stream* stream) { put(stream, graph); });
}

int cuEventCreate(Event** event, unsigned) { return *event = new_event(), OK; }
int cuEventDestroy_v2(Event* event) { return drop_event(event), OK; }
int cuEventRecord(Event* event, void* handle) {
    return on(handle, [=](Stream* stream) { record(event, stream); });
}
int cuEventQuery(Event* event) {
    bool done = false;
    int code = code_of(is_done(event, &done));
    return code != OK || done ? code : NOT_READY;
}
int cuEventSynchronize(Event* event) { return synchronize(event), OK; }
int cuEventElapsedTime(float* milliseconds, Event* from, Event* to) {
    double found = 0;
    return elapsed(&found, from, to) ? (*milliseconds = static_cast<float>(found), OK) : NOT_READY;
}

// `compiler.cpp` makes shared libraries, with their length in front.
int cuModuleLoadData(Module** module, const char* image) {
    if (fails(LOAD)) {
        return OUT_OF_MEMORY;
    }
    // Loading may wait for all work in the context, and here it does.
    synchronize_all();
    if (strncmp(image + strspn(image, "\n"), ".version", 8) == 0) {
        return *module = new Module{nullptr}, OK;
    }
    unsigned long long bytes = 0;
    memcpy(&bytes, image, sizeof bytes);
    void* library = library_of(std::string(image + sizeof bytes, bytes));
    return library == nullptr ? INVALID_IMAGE : (*module = new Module{library}, OK);
}
int cuModuleUnload(Module* module) { return delete module, OK; }  // stays loaded
int cuModuleGetFunction(Packer* function, Module* module, const char* name) {
    if (module->library == nullptr) {
        *function = program_kernel(name);
        return *function == nullptr ? NOT_FOUND : OK;
    }
    char symbol[128];
    snprintf(symbol, sizeof symbol, "emulated_%s", name);
    *function = reinterpret_cast<Packer>(dlsym(module->library, symbol));
    return *function == nullptr ? NOT_FOUND : OK;
}
int cuFuncSetAttribute(Packer, int, int) { return OK; }

// A matrix of `rank` dimensions, of which the first is the inner one: what `TensorMap` in `ptx_tensor.cuh` holds.
int cuTensorMapEncodeTiled(void* map, int type, unsigned rank, char* begin, const uint64_t* sizes, const uint64_t* pitches,
                           const unsigned* box, const unsigned*, int, int swizzle, int, int) {
    struct {
        char* begin;
        uint64_t columns, rows, parts, pitch, part_pitch;
        unsigned box_columns, box_rows, element;
    } const found = {begin,      sizes[0],   sizes[1], sizes[2], pitches[0],
                     pitches[1], box[0],     box[1],   type == 0 ? 1u : 2u};
    const uint64_t places = reinterpret_cast<uint64_t>(begin) | pitches[0] | pitches[1];
    if (rank != 3 || box[2] != 1 || swizzle != 3 || places % 16 != 0) {
        return INVALID;
    }
    memset(map, 0, 128);
    return memcpy(map, &found, sizeof found), OK;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Packer, int threads, size_t) {
    const int fit = threads > PROCESSOR_THREADS ? 1 : PROCESSOR_THREADS / threads;
    return *blocks = fit < processor_blocks ? fit : processor_blocks, OK;
}
int cuLaunchKernelEx(const LaunchConfig* config, Packer function, void** parameters, void**) {
    return put_kernel(config->stream, function, {config->grid[0], config->block[0]}, parameters);
}
int cuLaunchKernel(Packer function, unsigned x, unsigned, unsigned, unsigned threads, unsigned, unsigned,
                   unsigned, void* stream, void** parameters, void**) {
    return put_kernel(stream, function, {x, threads}, parameters);
}
}
