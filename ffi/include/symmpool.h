#ifndef SYMMPOOL_H
#define SYMMPOOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Symmetric memory for several ranks, and collectives on it.
//
// Generated from ffi/src/capi; do not edit. Functions may be called from any thread. They return a status,
// and symmpool_last_error returns the text of the last error. Handles are numbers that are never used twice:
// using one that was destroyed is an INVALID_ARGUMENT.
//
// For allocators that take plain functions there are also, for N from 0 to 63 (see
// symmpool_slot_bind):
//
//     void *symmpool_alloc_N(ssize_t size, int device, cudaStream_t stream);
//     void symmpool_free_N(void *pointer, size_t size, int device, cudaStream_t stream);


// A flag of symmpool_pool_create: several ranks may use one GPU.
#define SYMMPOOL_SHARED_DEVICE 1

// A flag of symmpool_pool_create: every block lies in one physical allocation, which NCCL before
// 2.30.3 needs for its windows. Packs blocks less tightly.
#define SYMMPOOL_PER_SEGMENT 2

// The result of a call. There is one value for each kind of error that callers may handle differently.
typedef enum {
  // Success.
  SYMMPOOL_STATUS_OK = 0,
  // An argument is invalid, such as NULL; nothing was changed.
  SYMMPOOL_STATUS_INVALID_ARGUMENT = 1,
  // Memory, address range or a limit is exhausted.
  SYMMPOOL_STATUS_OUT_OF_MEMORY = 2,
  // Ranks made different calls, or were configured differently.
  SYMMPOOL_STATUS_DIVERGED = 3,
  // A deadline passed before the other ranks arrived.
  SYMMPOOL_STATUS_TIMEOUT = 4,
  // A peer's process has ended.
  SYMMPOOL_STATUS_PEER_LOST = 5,
  // This machine, library or build cannot do it.
  SYMMPOOL_STATUS_UNSUPPORTED = 6,
  // Wrong secret, protocol version or user.
  SYMMPOOL_STATUS_REFUSED = 7,
  // The call is not possible in the current state, such as a commit within a commit.
  SYMMPOOL_STATUS_INVALID_STATE = 8,
  // The operating system or a device library failed.
  SYMMPOOL_STATUS_SYSTEM = 9,
  // A bug of this library; the error's text says where.
  SYMMPOOL_STATUS_INTERNAL = 10,
  // A rank has no room for all that it was sent; the last of it was not written.
  SYMMPOOL_STATUS_OVERFLOW = 11,
} symmpool_status;

// Element types, for the `dtype` of collectives. The first ten can be reduced; the others are only moved.
// The last five stand for any other element of that many bytes.
typedef enum {
  SYMMPOOL_DTYPE_F32 = 0,
  SYMMPOOL_DTYPE_F64 = 1,
  SYMMPOOL_DTYPE_F16 = 2,
  SYMMPOOL_DTYPE_BF16 = 3,
  SYMMPOOL_DTYPE_I32 = 4,
  SYMMPOOL_DTYPE_I64 = 5,
  SYMMPOOL_DTYPE_U8 = 6,
  SYMMPOOL_DTYPE_I8 = 7,
  SYMMPOOL_DTYPE_F8E4M3 = 8,
  SYMMPOOL_DTYPE_F8E5M2 = 9,
  SYMMPOOL_DTYPE_BOOL = 10,
  SYMMPOOL_DTYPE_I16 = 11,
  SYMMPOOL_DTYPE_U16 = 12,
  SYMMPOOL_DTYPE_U32 = 13,
  SYMMPOOL_DTYPE_U64 = 14,
  SYMMPOOL_DTYPE_COMPLEX32 = 15,
  SYMMPOOL_DTYPE_COMPLEX64 = 16,
  SYMMPOOL_DTYPE_COMPLEX128 = 17,
  SYMMPOOL_DTYPE_F8E4M3_FNUZ = 18,
  SYMMPOOL_DTYPE_F8E5M2_FNUZ = 19,
  SYMMPOOL_DTYPE_F8E8M0 = 20,
  SYMMPOOL_DTYPE_F4E2M1X2 = 21,
  SYMMPOOL_DTYPE_BYTES1 = 22,
  SYMMPOOL_DTYPE_BYTES2 = 23,
  SYMMPOOL_DTYPE_BYTES4 = 24,
  SYMMPOOL_DTYPE_BYTES8 = 25,
  SYMMPOOL_DTYPE_BYTES16 = 26,
} symmpool_dtype;

// Engine that carries out a one-sided operation on CUDA. In host memory it makes no difference.
typedef enum {
  // A kernel, which occupies SMs.
  SYMMPOOL_ENGINE_KERNEL = 0,
  // A copy engine for symmpool_put and symmpool_get, memory operations of the stream for symmpool_signal and
  // symmpool_wait. They occupy no SM. A copy takes some microseconds more to start.
  SYMMPOOL_ENGINE_WITHOUT_SMS = 1,
} symmpool_engine;

// Reduction operations, for the `op` of collectives. Results have the same bits on every rank.
typedef enum {
  SYMMPOOL_OP_SUM = 0,
  SYMMPOOL_OP_PROD = 1,
  SYMMPOOL_OP_MIN = 2,
  SYMMPOOL_OP_MAX = 3,
  SYMMPOOL_OP_AVG = 4,
} symmpool_op;

// How received rows lie, for the `layout` of symmpool_dispatch_info.
typedef enum {
  // A row for each received token, by rank and there in the order of tokens, where symmpool_experts_received says.
  SYMMPOOL_EXPERTS_LAYOUT_BY_RANK = 0,
  // A row for each received token and expert of it on this rank, in `output`: by expert, then by rank, then by token.
  // Each expert's first row is a multiple of `alignment`; rows between experts are not written.
  SYMMPOOL_EXPERTS_LAYOUT_BY_EXPERT = 1,
  // Rows by expert, of which each expert of this rank has `output_rows`: `output` is [experts of this rank,
  // output_rows, hidden], and `output_scales` are [experts, scales of a row, output_rows].
  SYMMPOOL_EXPERTS_LAYOUT_PACKED = 2,
} symmpool_experts_layout;

// How tokens are made F8E4M3 when they are sent, for the `quantize` of symmpool_dispatch_info: each 128 channels have a
// scale, their largest magnitude, but at least 1e-4, divided by 448.
typedef enum {
  // Tokens travel as they are.
  SYMMPOOL_QUANTIZE_NONE = 0,
  // Scales are float.
  SYMMPOOL_QUANTIZE_FP8 = 1,
  // Scales are float, rounded up to powers of two.
  SYMMPOOL_QUANTIZE_FP8_POW2 = 2,
  // Scales are the exponents of these, a byte each.
  SYMMPOOL_QUANTIZE_FP8_UE8M0 = 3,
} symmpool_quantize;

// A handle of a communicator: collectives between the ranks of a pool. 0 is never a valid handle.
typedef uint64_t symmpool_comm;

// A call as a function sees it that chooses its algorithm.
typedef struct {
  // Bytes of the larger one of input and output.
  uint64_t bytes;
  // A symmpool_dtype.
  uint32_t dtype;
  // A symmpool_op; 0 for what does not reduce.
  uint32_t op;
  // The number of ranks.
  uint32_t world;
  // Whether the input and the output lie in windows.
  bool input_window;
  // See input_window.
  bool output_window;
} symmpool_call_info;

// Chooses an algorithm for a call: returns its name, which must stay as it is until the function's next call, or NULL
// to leave it open. `data` is what was given with the function.
typedef const char *(*symmpool_selector)(const symmpool_call_info *call, void *data);

// A handle of a pool: symmetric memory of this rank, and windows of its peers' memory. 0 is never a valid
// handle.
typedef uint64_t symmpool_pool;

// Shape of a buffer for experts. All but num_sms is the same on every rank.
typedef struct {
  // Channels of a token; a row has a multiple of 16 bytes.
  size_t hidden;
  // The most tokens that a rank has in a call.
  size_t max_tokens;
  // The most tokens that a rank can receive; 0 for all that there may be, max_tokens of each rank.
  size_t capacity;
  // Experts of all ranks together, a multiple of the number of ranks: expert e is on rank e / (experts / ranks).
  uint32_t experts;
  // Experts that each token names.
  uint32_t top_k;
  // A symmpool_dtype, of what experts return and of tokens that are not quantised: F32, F16 or BF16.
  uint32_t dtype;
  // The most SMs that kernels take, 2 or more; 0 for what is best.
  uint32_t num_sms;
} symmpool_experts_shape;

// A handle of a buffer for experts: what sends tokens to the ranks of their experts, and sums up what comes back. 0 is
// never a valid handle.
typedef uint64_t symmpool_experts;

// Bytes that a buffer for experts has on a rank.
typedef struct {
  // Received rows.
  size_t received_rows;
  // Their scales.
  size_t received_scales;
  // Which experts they are for, with weights, and where they go.
  size_t routing;
  // Rows that come back.
  size_t combined_rows;
  // All of these: the buffer's symmetric memory.
  size_t total;
  // A handle, which is the caller's memory and not part of the total.
  size_t handle;
} symmpool_experts_memory_info;

// Where received rows lie that are ordered by rank, and what belongs to them: addresses on the pool's device, all with
// room for `capacity` rows. The next dispatch of the buffer overwrites them.
typedef struct {
  // The rows, one behind the other.
  void *rows;
  // Their scales, as many bytes for each as were sent.
  void *scales;
  // For each row and each of its top_k ids the number of the expert among those of this rank, or -1.
  int32_t *ids;
  // The weights of these; 1 if none were sent.
  float *weights;
  // The most rows that this rank can receive.
  size_t capacity;
} symmpool_experts_received_info;

// Where things lie in a handle, in bytes. All are int32_t, but for the weights, which are float.
typedef struct {
  // Bytes of a handle, which begins at a multiple of 16.
  size_t bytes;
  // How many rows were received, how many tokens this rank sent, and how many rows by expert there are, with padding.
  size_t head;
  // Where the rows of each rank begin among those received, and the end: a number more than ranks.
  size_t source_offsets;
  // For each received row which token of its rank it is: as many as the buffer's capacity.
  size_t source_index;
  // How many rows each expert of this rank was sent.
  size_t expert_counts;
  // Where the rows of each expert of this rank begin if they lie by expert, and the end: a number more than experts.
  size_t expert_offsets;
  // For each received row and id its row by expert; -1 for none.
  size_t places;
  // The weights of these.
  size_t weights;
} symmpool_experts_handle_info;

// Arguments of symmpool_dispatch; those that are not needed are 0 or NULL. All addresses are on the pool's device.
typedef struct {
  // The tokens, [tokens, hidden], of the buffer's type, or F8E4M3 if `quantized`. It begins at a multiple of 16.
  const void *input;
  // The scales of tokens that are quantised already, [tokens, scale_bytes].
  const void *scales;
  // For each token its top_k experts, [tokens, top_k]; -1 stands for none. Not needed if `known`.
  const void *ids;
  // The weights of these, or NULL for 1. They travel with the rows.
  const float *weights;
  // Where rows by expert are written; it begins at a multiple of 16. Not needed in layout BY_RANK.
  void *output;
  // Where their scales are written.
  void *output_scales;
  // Rows that `output` and `output_scales` have room for; in layout PACKED those of each expert.
  size_t output_rows;
  // How many tokens this rank has.
  size_t tokens;
  // Bytes of the scales of a token that is quantised already: at most 4 for each 128 channels.
  size_t scale_bytes;
  // A symmpool_dtype, I32 or I64.
  uint32_t ids_dtype;
  // A symmpool_quantize.
  uint32_t quantize;
  // A symmpool_experts_layout.
  uint32_t layout;
  // Divisor of the number of each expert's first row in layout BY_EXPERT: 1 to 65536; 0 for 1.
  uint32_t alignment;
  // Whether tokens are quantised already.
  bool quantized;
  // Whether tokens go where those of the handle's dispatch went, in the same layout. Ids and weights are not sent.
  bool known;
} symmpool_dispatch_info;

// How many rows a rank receives in a dispatch.
typedef struct {
  // Tokens that it received and has room for: a row each in layout BY_RANK.
  size_t rows;
  // Rows by expert, with padding between experts; 0 in layout BY_RANK.
  size_t rows_by_expert;
} symmpool_dispatch_sizes;

// Arguments of symmpool_combine.
typedef struct {
  // Rows of experts, of the buffer's type, which lie as those of the dispatch did. It begins at a multiple of 16, and is
  // not NULL even if there are none.
  const void *input;
  // Where the sums are written, [tokens, hidden]. It begins at a multiple of 16, and does not overlap `input`.
  void *output;
  // Factors of the rows in layouts by expert, [tokens, top_k], on the rank of the tokens; NULL for the weights of
  // the dispatch.
  const float *weights;
  // How many tokens this rank had in the dispatch.
  size_t tokens;
  // The symmpool_experts_layout of the dispatch.
  uint32_t layout;
} symmpool_combine_info;

// A handle of a group: an ordered set of ranks, of which this process is one. 0 is never a valid handle.
typedef uint64_t symmpool_group;

// Effects of a commit.
typedef struct {
  // The number of the commit, counted from 1.
  uint64_t number;
  // How many windows it added.
  uint64_t windows_added;
  // How many windows it removed.
  uint64_t windows_removed;
  // How many blocks that every rank had freed without order can be reused now.
  uint64_t blocks_returned;
} symmpool_commit_report;

// Statistics of a pool, over all lanes.
typedef struct {
  // Bytes that are allocated.
  uint64_t allocated;
  // Bytes of physical memory.
  uint64_t reserved;
  // The number of successful commits.
  uint64_t commits;
  // The number of windows.
  uint64_t windows;
} symmpool_pool_stats;

// Where every rank's memory lies in this process. If p is an address of rank a's memory, the
// corresponding address of rank b's is p + (b - a) * stride.
typedef struct {
  // The first address of rank 0's slot.
  uint64_t base;
  // Bytes from one rank's slot to the next.
  uint64_t stride;
  // This process's rank.
  uint32_t rank;
  // The number of ranks.
  uint32_t world;
} symmpool_layout_info;

// Memory that every rank has mapped at the same offset.
typedef struct {
  // Offset in bytes from the start of a rank's slot.
  uint64_t offset;
  // Length in bytes.
  uint64_t bytes;
  // The serial number of the segment in its lane.
  uint64_t counter;
} symmpool_window;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The library's version, such as "0.1.0".
const char *symmpool_version(void);

// The status of this thread's latest failed call and, if `text` is not NULL, the error's text, which is valid until
// the thread's next call fails.
//
// # Safety
//
// `text` is NULL or can be written to.
symmpool_status symmpool_last_error(const char **text);

// Registers a plan with a communicator under the plan's name: calls of its collective can name it from now on, as
// SYMMPOOL_ALL_REDUCE and the like can. `json` is a plan as symmpool.language saves it; it is proved before it is
// registered. The call does not communicate with other ranks; all must have registered the same before a call names
// it. INVALID_ARGUMENT for what is no plan, is wrong, is for another number of ranks, or has another one's name.
//
// # Safety
//
// `json` is NULL (an error) or a C string.
symmpool_status symmpool_comm_register_plan(symmpool_comm comm,
                                            const char *json);

// Registers a CUDA kernel with a communicator as an algorithm for a collective, under the kernel's name. `source` is CUDA
// C++ with an extern "C" __global__ function called `kernel`, written against symmpool/device.cuh (docs/kernels.md). Peers
// may access inputs and outputs, which calls must then pass as windows, if `input_window` and `output_window` say so;
// `in_place` says that both may be one memory. `max_bytes` bounds the larger one of input and output, for kernels whose
// data has to fit into an inbox: longer calls are UNSUPPORTED; 0 stands for any size. It has at most `blocks` thread blocks,
// or as many as a call's size is worth if that is 0, of `threads` threads: 32, 64, 128, 256 or 512. Nothing is compiled
// before a call needs it. Otherwise as symmpool_comm_register_plan. On a communicator in host memory calls of it are
// UNSUPPORTED.
//
// # Safety
//
// `collective`, `kernel` and `source` are NULL (an error) or C strings.
symmpool_status symmpool_comm_register_kernel(symmpool_comm comm,
                                              const char *collective,
                                              const char *kernel,
                                              const char *source,
                                              bool input_window,
                                              bool output_window,
                                              bool in_place,
                                              uint64_t max_bytes,
                                              uint32_t blocks,
                                              uint32_t threads);

// Makes a call of `collective` ("all_reduce", "reduce_scatter", "all_gather", "broadcast" or "all_to_all") as the
// function of that name does, with the algorithm called `algorithm`, built in or registered; NULL chooses as that function
// does. `op` matters to what reduces and `root` to a broadcast, whose data is at `output`; `input` may be NULL there.
//
// # Safety
//
// You must keep the promises of the collective's own function; `collective` and `algorithm` are NULL or C strings.
symmpool_status symmpool_collective(symmpool_comm comm,
                                    const char *collective,
                                    const char *algorithm,
                                    void *output,
                                    const void *input,
                                    size_t count,
                                    uint32_t dtype,
                                    uint32_t op,
                                    uint32_t root,
                                    void *stream);

// Writes the names of the algorithms that a communicator has for a collective to `names`, one in each line and with a NUL at the
// end, as far as `capacity` bytes hold them, and how many bytes all need, the NUL included, to `length`.
//
// # Safety
//
// `collective` is NULL (an error) or a C string, `names` can be written to for `capacity` bytes, and `length` is NULL (an
// error) or can be written to.
symmpool_status symmpool_comm_algorithms(symmpool_comm comm,
                                         const char *collective,
                                         char *names,
                                         size_t capacity,
                                         size_t *length);

// Has a function choose the algorithm of calls of a collective that name none; NULL ends that. It must choose alike on
// every rank: DIVERGED names those that differ. A name that is unknown or does not fit the call has it made as if NULL
// was returned. The thread that makes a call calls it, outside of all locks; it must make no calls itself.
//
// # Safety
//
// `collective` is NULL (an error) or a C string; the function can be called with `data` from any thread until another one
// takes its place or the communicator is destroyed and no call is under way.
symmpool_status symmpool_comm_select(symmpool_comm comm,
                                     const char *collective,
                                     symmpool_selector selector,
                                     void *data);

// Creates a communicator of all ranks of `pool`. Collective: every rank creates its communicators in the
// same order. `timeout` is how long its calls wait for a late rank, in seconds, or 0 for 30. If one rank's
// arguments are refused, all ranks get an error, and the pool can be used again after symmpool_resync. Where ranks are on
// several hosts, all get SYMMPOOL_STATUS_UNSUPPORTED, and the pool stays usable: only Rust and Python give communicators
// what carries data between hosts.
//
// # Safety
//
// `comm` is NULL (an error) or can be written to.
symmpool_status symmpool_comm_create(symmpool_pool pool,
                                     double timeout,
                                     symmpool_comm *comm);

// Changes how long this rank's calls wait for a late rank, in seconds. The call does not communicate with
// other ranks. Calls that are running keep their timeout, and so does work that is on a CUDA stream already, or
// captured in a graph. Another thread may be in a call.
symmpool_status symmpool_comm_set_timeout(symmpool_comm comm,
                                          double timeout);

// Destroys a communicator. Ranks may do so at any time, without agreement.
symmpool_status symmpool_comm_destroy(symmpool_comm comm);

// Reduces `count` elements of every rank's `input` into every rank's `output`, which may be the
// same address. The following holds for all collectives. Every rank calls them in the same order, with the same
// arguments except for addresses. Memory in windows is used in place, other memory is copied. On CUDA the call
// only enqueues work on `stream`, and errors of that work show in later calls or in symmpool_comm_synchronize.
// Errors: DIVERGED if ranks have different arguments, TIMEOUT, PEER_LOST; after the last two, a peer that is
// still in the call may continue to write into `output` until it has left the call.
//
// # Safety
//
// `input` can be read and `output` written for `count` elements by the CPU or, on CUDA, the device, and nobody
// else accesses them until the work is done. `stream` is NULL or a stream that exists until
// symmpool_comm_forget_stream, or as long as the communicator.
symmpool_status symmpool_all_reduce(symmpool_comm comm,
                                    void *output,
                                    const void *input,
                                    size_t count,
                                    uint32_t dtype,
                                    uint32_t op,
                                    void *stream);

// Reduces part r of every rank's `input` into rank r's `output` of `count` elements; the input has
// one part for each rank.
//
// # Safety
//
// You must keep the promises of symmpool_all_reduce, for these lengths.
symmpool_status symmpool_reduce_scatter(symmpool_comm comm,
                                        void *output,
                                        const void *input,
                                        size_t count,
                                        uint32_t dtype,
                                        uint32_t op,
                                        void *stream);

// Copies rank r's `input` of `count` elements to part r of every rank's `output`.
//
// # Safety
//
// You must keep the promises of symmpool_all_reduce; `output` has one part for each rank.
symmpool_status symmpool_all_gather(symmpool_comm comm,
                                    void *output,
                                    const void *input,
                                    size_t count,
                                    uint32_t dtype,
                                    void *stream);

// Copies `count` elements of rank `root`'s `data` to every other rank's.
//
// # Safety
//
// You must keep the promises of symmpool_all_reduce, for `data` as input and output.
symmpool_status symmpool_broadcast(symmpool_comm comm,
                                   void *data,
                                   size_t count,
                                   uint32_t dtype,
                                   uint32_t root,
                                   void *stream);

// Sends part r of `input` to rank r, where it becomes this rank's part of `output`. Both have one
// part of `count` elements for each rank.
//
// # Safety
//
// You must keep the promises of symmpool_all_reduce, for these lengths.
symmpool_status symmpool_all_to_all(symmpool_comm comm,
                                    void *output,
                                    const void *input,
                                    size_t count,
                                    uint32_t dtype,
                                    void *stream);

// Sends `input_counts[r]` elements to rank r, and receives `output_counts[r]` from it. Parts lie in
// rank order without gaps; any may be empty. Both arrays have an entry for each rank.
//
// # Safety
//
// You must keep the promises of symmpool_all_reduce, for the sums of the counts; the arrays can be read for as many
// entries as there are ranks.
symmpool_status symmpool_all_to_all_v(symmpool_comm comm,
                                      void *output,
                                      const void *input,
                                      const size_t *output_counts,
                                      const size_t *input_counts,
                                      uint32_t dtype,
                                      void *stream);

// Returns, or on CUDA lets the work behind it on `stream` run, once every rank has called it. Errors as for
// symmpool_all_reduce.
//
// # Safety
//
// `stream` is NULL or a live stream.
symmpool_status symmpool_barrier(symmpool_comm comm,
                                 void *stream);

// Waits until this rank's calls on `stream` are done, and returns their error if they failed.
//
// # Safety
//
// `stream` is NULL or a live stream.
symmpool_status symmpool_comm_synchronize(symmpool_comm comm, void *stream);

// Makes the communicator forget a stream that is about to be destroyed: it does not use the stream any more unless a
// call names it again. Work that is on the stream keeps its place in the order of calls. Ranks may call this at
// different times. The pool remembers streams too: see symmpool_forget_stream. INVALID_STATE in a forked child, and
// while the stream is being captured if the communicator's last call is on it.
//
// # Safety
//
// `stream` is NULL or a live stream.
symmpool_status symmpool_comm_forget_stream(symmpool_comm comm,
                                            void *stream);

// The bytes of symmetric memory that a buffer for experts of this shape has on each of `world` ranks, before there is
// one.
//
// # Safety
//
// `shape` is NULL (an error) or can be read, and `bytes` is NULL (an error) or can be written to.
symmpool_status symmpool_experts_bytes(const symmpool_experts_shape *shape,
                                       uint32_t world,
                                       size_t *bytes);

// Creates a buffer for experts on a communicator (docs/experts.md). It allocates memory of the pool: every rank creates
// its buffers, with the same shapes, at the same place of its sequence of allocations, and none while a graph is
// captured. On CUDA it compiles kernels and waits for what runs; commit the pool before a capture. Errors:
// INVALID_ARGUMENT for an impossible shape, which the text names, OUT_OF_MEMORY, UNSUPPORTED. They are this rank's
// alone: ranks whose buffers differ get DIVERGED from their next call.
//
// # Safety
//
// `shape` is NULL (an error) or can be read, and `experts` is NULL (an error) or can be written to.
symmpool_status symmpool_experts_create(symmpool_comm comm,
                                        const symmpool_experts_shape *shape,
                                        symmpool_experts *experts);

// Destroys a buffer for experts. It waits for nothing: the commit by which its memory returns waits for the device. Graphs
// that captured its calls must not run again. Ranks may do so at any time, without agreement.
symmpool_status symmpool_experts_destroy(symmpool_experts experts);

// Has kernels of later calls take at most so many SMs, 2 or more, or what is best if `num_sms` is 0. Captured calls keep
// what they were captured with.
symmpool_status symmpool_experts_set_num_sms(symmpool_experts experts,
                                             uint32_t num_sms);

// The bytes that a buffer for experts has on this rank, by part.
//
// # Safety
//
// `memory` is NULL (an error) or can be written to.
symmpool_status symmpool_experts_memory(symmpool_experts experts,
                                        symmpool_experts_memory_info *memory);

// Where a buffer's received rows lie in layout BY_RANK. It stays the same as long as the buffer lives.
//
// # Safety
//
// `received` is NULL (an error) or can be written to.
symmpool_status symmpool_experts_received(symmpool_experts experts,
                                          symmpool_experts_received_info *received);

// Where things lie in a handle of a buffer, and how long it is.
//
// # Safety
//
// `handle` is NULL (an error) or can be written to.
symmpool_status symmpool_experts_handle(symmpool_experts experts,
                                        symmpool_experts_handle_info *handle);

// The most rows that this rank can receive in layout BY_EXPERT with such an alignment (0 for 1): what `output` needs room
// for so that none is ever missing.
//
// # Safety
//
// `rows` is NULL (an error) or can be written to.
symmpool_status symmpool_experts_rows_by_expert(symmpool_experts experts,
                                                uint32_t alignment,
                                                size_t *rows);

// Sends tokens to the ranks of their experts, and keeps in `handle`, memory of the caller, how they were routed. Every
// rank calls it in the same order as its other calls, with tokens or without, in the same layout. On CUDA the call only
// enqueues work on `stream`; tokens, ids and weights are read when it runs, so that each replay of a captured graph
// routes anew. Errors, besides those of symmpool_all_reduce: INVALID_ARGUMENT on every rank for an id that is neither an
// expert nor -1, which the text names with its rank and token and which counts as -1; OVERFLOW on every rank if one has
// no room for all rows it is sent, the last of which are not written. On CUDA both come from symmpool_comm_synchronize,
// and after both the communicator stays usable.
//
// # Safety
//
// Memory that `dispatch` names can be read and written for its lengths by the CPU or, on CUDA, the device, and
// nobody else accesses it until the work is done. `dispatch` is NULL (an error) or can be read. `handle` can be
// written to for the bytes that symmpool_experts_handle says; if `dispatch` has `known`, a dispatch of this buffer
// with as many tokens wrote it. `stream` as for symmpool_all_reduce.
symmpool_status symmpool_dispatch(symmpool_experts experts,
                                  void *handle,
                                  const symmpool_dispatch_info *dispatch,
                                  void *stream);

// Dispatches like symmpool_dispatch of a new routing, and waits until it is known how many rows this rank receives;
// on CUDA they may still be on their way then, and what `stream` is given next finds them there. `expert_counts`
// gets how many rows each expert of this rank was sent, with those that had no room, and may be NULL. Errors are
// those of symmpool_dispatch and, on CUDA, of symmpool_comm_synchronize; INVALID_ARGUMENT also where `dispatch` has
// `known`, and INVALID_STATE while `stream` is captured. Nothing is written to `sizes` and `expert_counts` then.
//
// # Safety
//
// You must keep the promises of symmpool_dispatch. `sizes` is NULL (an error) or can be written to, and
// `expert_counts` is NULL or has room for a number for each expert of this rank.
symmpool_status symmpool_dispatch_exact(symmpool_experts experts,
                                        void *handle,
                                        const symmpool_dispatch_info *dispatch,
                                        symmpool_dispatch_sizes *sizes,
                                        size_t *expert_counts,
                                        void *stream);

// Sends rows back to the ranks of their tokens, and sums up the rows of each token in float, in the order of ranks. A
// token without rows becomes zeros. Rows by expert are multiplied by weights and summed up on their rank first, in the
// order of the token's ids; that sum travels rounded to the buffer's type. Otherwise as symmpool_dispatch.
//
// # Safety
//
// You must keep the promises of symmpool_dispatch. `handle` is one that a dispatch of this buffer wrote, in the
// layout and for as many tokens as `combine` says, and `input` has all rows that were received then.
symmpool_status symmpool_combine(symmpool_experts experts,
                                 void *handle,
                                 const symmpool_combine_info *combine,
                                 void *stream);

// The group that a launcher describes in the environment: torchrun, mpirun, srun or Kubernetes, by the variables in
// docs/hosts.md (and SYMMPOOL_PORT, SYMMPOOL_SECRET where they are set). `timeout` is how long collective
// operations of the group wait for other ranks, in seconds. Errors: INVALID_ARGUMENT for variables that
// are missing or wrong, TIMEOUT, REFUSED if ranks have different secrets.
//
// # Safety
//
// `group` is NULL (an error) or can be written to.
symmpool_status symmpool_group_from_env(double timeout,
                                        symmpool_group *group);

// A group whose ranks connect over TCP to `address`, "HOST:PORT", which rank 0 serves. `secret` must be
// the same on every rank; it may be NULL if the address is a loopback address. `timeout` and errors as
// for symmpool_group_from_env.
//
// # Safety
//
// `address` and `secret` are NULL or C strings, `group` is NULL (an error) or can be written to.
symmpool_status symmpool_group_over_tcp(uint32_t rank,
                                        uint32_t world,
                                        const char *address,
                                        const char *secret,
                                        double timeout,
                                        symmpool_group *group);

// A group whose ranks exchange files in `directory`, which all ranks see and nothing else uses.
// `timeout` as for symmpool_group_from_env.
//
// # Safety
//
// `directory` is NULL (an error) or a C string, `group` is NULL (an error) or can be written to.
symmpool_status symmpool_group_in_directory(uint32_t rank,
                                            uint32_t world,
                                            const char *directory,
                                            double timeout,
                                            symmpool_group *group);

// This process's rank in `group`, from 0, and the number of ranks. Either may be NULL.
//
// # Safety
//
// `rank` and `world` are NULL or can be written to.
symmpool_status symmpool_group_size(symmpool_group group, uint32_t *rank, uint32_t *world);

// Destroys a group. Pools that were made with it keep what they need.
symmpool_status symmpool_group_destroy(symmpool_group group);

// Allocates `bytes` at a multiple of `align` (a power of two up to 2 MiB; 0 for 512) for use on
// `stream`, a CUstream, NULL for the default one and in host memory. The call does not communicate with
// other ranks; every rank makes the same calls in the same order. Errors: OUT_OF_MEMORY, INVALID_ARGUMENT,
// INVALID_STATE in a child that was forked from the pool's process.
//
// # Safety
//
// `stream` is NULL or a stream of the pool's device that exists until symmpool_forget_stream, or as long as
// the pool; `pointer` is NULL (an error) or can be written to.
symmpool_status symmpool_alloc(symmpool_pool pool,
                               size_t bytes,
                               uint64_t align,
                               void *stream,
                               void **pointer);

// Frees a block as part of the sequence of calls: every rank frees it at the same point of the sequence,
// and the next call may reuse its memory. INVALID_ARGUMENT for anything that is not a live block.
symmpool_status symmpool_free(symmpool_pool pool,
                              void *pointer);

// Frees a block at a time that may differ between ranks. Its memory can be reused after the commit by
// which every rank has freed it. INVALID_ARGUMENT for anything that is not a live block.
symmpool_status symmpool_free_unordered(symmpool_pool pool,
                                        void *pointer);

// Records that a block is used on `stream` too: its memory is reused only after the work that is on that
// stream when the block is freed. INVALID_ARGUMENT for anything that is not a live block.
//
// # Safety
//
// You must keep the promises of symmpool_alloc.
symmpool_status symmpool_record_stream(symmpool_pool pool,
                                       void *pointer,
                                       void *stream);

// Makes sure that a block of `bytes` can be allocated on `stream` without growing. Every rank calls it
// at the same point of the sequence of calls. Errors as for symmpool_alloc.
//
// # Safety
//
// You must keep the promises of symmpool_alloc.
symmpool_status symmpool_reserve(symmpool_pool pool,
                                 uint64_t bytes,
                                 void *stream);

// Makes the pool forget a stream that is about to be destroyed. A pool remembers up to 64 streams that it was
// given, and uses them until they are forgotten; the free blocks of a forgotten stream go to the next stream that
// is new to the pool. Every rank calls it at the same point of the sequence of calls. Does nothing for a stream that
// the pool does not know. Errors: INVALID_STATE while the stream is being captured, and in a forked child.
//
// # Safety
//
// `stream` is NULL or a live stream of the pool's device.
symmpool_status symmpool_forget_stream(symmpool_pool pool,
                                       void *stream);

// Copies `bytes` bytes from `src` to the place in rank `peer`'s memory that corresponds to `dst`, which lies in
// windows. `peer` may read them after it has received a later symmpool_signal of this thread or stream. In host memory
// the copy is done when the call returns; on CUDA it is work on `stream`. `engine` is a symmpool_engine. Only this
// rank calls it; the other ranks need not do anything. Errors: INVALID_ARGUMENT if there is no such rank or engine, or
// if `dst` is in no window.
//
// # Safety
//
// `src` can be read for `bytes` bytes by the CPU or, on CUDA, the device, and nobody else writes there or accesses
// the destination until the work is done. `stream` is as for symmpool_all_reduce.
symmpool_status symmpool_put(symmpool_comm comm,
                             void *dst,
                             const void *src,
                             size_t bytes,
                             uint32_t peer,
                             uint32_t engine,
                             void *stream);

// Copies `bytes` bytes to `dst` from the place in rank `peer`'s memory that corresponds to `src`, which lies in
// windows. `peer` has written them before a symmpool_signal that this rank has received. Otherwise as symmpool_put,
// with `src` in the place of `dst`.
//
// # Safety
//
// `dst` can be written to for `bytes` bytes by the CPU or, on CUDA, the device, and nobody else accesses it or writes
// the source until the work is done. `stream` is as for symmpool_all_reduce.
symmpool_status symmpool_get(symmpool_comm comm,
                             void *dst,
                             const void *src,
                             size_t bytes,
                             uint32_t peer,
                             uint32_t engine,
                             void *stream);

// Signals rank `peer` on a channel from 0 to 15. What this thread or, on CUDA, `stream` did before is visible to
// `peer` after its symmpool_wait with the same engine. Signals are counted. Those without SMs have channels of their
// own, which on CUDA hold one signal each: the next one waits on the stream until the last was received. Errors:
// INVALID_ARGUMENT if there is no such rank, channel or engine.
//
// # Safety
//
// `stream` is as for symmpool_all_reduce.
symmpool_status symmpool_signal(symmpool_comm comm,
                                uint32_t peer,
                                uint32_t channel,
                                uint32_t engine,
                                void *stream);

// Receives the next signal of rank `peer` on a channel: waits for it for `timeout` seconds at most. In host memory the
// calling thread waits, on CUDA `stream` does. Errors as for symmpool_signal, PEER_LOST, and TIMEOUT: in host memory
// from this call, after which the communicator can be used; on CUDA from a later call, and all calls of the
// communicator fail from then on.
//
// # Safety
//
// `stream` is as for symmpool_all_reduce.
symmpool_status symmpool_wait(symmpool_comm comm,
                              uint32_t peer,
                              uint32_t channel,
                              double timeout,
                              uint32_t engine,
                              void *stream);

// Creates a pool together with the other ranks of `group`, which call this with the same settings.
// `device` is "cpu", "cuda:N", "cuda" (device LOCAL_RANK), or NULL: a CUDA device if there is one,
// else the CPU. `stride` is the address space of a rank in bytes, a multiple of 2 MiB, or 0 for
// 1 TiB. `flags` are SYMMPOOL_SHARED_DEVICE and SYMMPOOL_PER_SEGMENT. Errors: DIVERGED if ranks have
// different settings, UNSUPPORTED where memory cannot be shared, TIMEOUT and PEER_LOST. If one rank
// fails or refuses its arguments, all ranks get that error.
//
// # Safety
//
// `device` is NULL or a C string, `pool` is NULL (an error) or can be written to.
symmpool_status symmpool_pool_create(symmpool_group group,
                                     const char *device,
                                     uint64_t stride,
                                     uint32_t flags,
                                     symmpool_pool *pool);

// Destroys a pool. Its memory is freed once no communicator, slot or call uses the pool.
symmpool_status symmpool_pool_destroy(symmpool_pool pool);

// Checks that all ranks did the same, and makes windows of new memory. Collective. `report` may be
// NULL. Errors: DIVERGED, whose text says where ranks differ, TIMEOUT, PEER_LOST, INVALID_STATE while a
// stream is being captured or another thread commits, and errors of another rank. After an error nothing
// is shared, and the pool can be used again after symmpool_resync.
//
// # Safety
//
// `report` is NULL or can be written to.
symmpool_status symmpool_commit(symmpool_pool pool,
                                symmpool_commit_report *report);

// Whether a commit is due: the pool has grown since the last one, or many freed blocks wait for one before they can
// be reused. The result is the same on every rank.
//
// # Safety
//
// `due` is NULL (an error) or can be written to.
symmpool_status symmpool_is_commit_due(symmpool_pool pool,
                                       bool *due);

// Brings all ranks to the same state again after DIVERGED. Collective. Blocks that were allocated since
// the last commit must have been freed.
symmpool_status symmpool_resync(symmpool_pool pool);

// The statistics of a pool.
//
// # Safety
//
// `stats` is NULL (an error) or can be written to.
symmpool_status symmpool_stats(symmpool_pool pool, symmpool_pool_stats *stats);

// Binds the pool to a free slot N and writes N to `slot`. The functions symmpool_alloc_N and
// symmpool_free_N then allocate from the pool, for allocators that take plain functions, such as torch's
// CUDAPluggableAllocator. Their frees are unordered, as with symmpool_free_unordered. INVALID_STATE if all
// 64 slots are in use.
//
// # Safety
//
// `slot` is NULL (an error) or can be written to.
symmpool_status symmpool_slot_bind(symmpool_pool pool,
                                   uint32_t *slot);

// Closes a slot to allocations. It keeps its pool until all blocks that it allocated are freed.
// INVALID_ARGUMENT for a slot that is not bound.
symmpool_status symmpool_slot_release(uint32_t slot);

// Where every rank's memory lies in this process.
//
// # Safety
//
// `layout` is NULL (an error) or can be written to.
symmpool_status symmpool_layout(symmpool_pool pool, symmpool_layout_info *layout);

// Whether all `bytes` from `pointer` lie in windows.
//
// # Safety
//
// `is` is NULL (an error) or can be written to.
symmpool_status symmpool_is_window(symmpool_pool pool,
                                   const void *pointer,
                                   uint64_t bytes,
                                   bool *is);

// The address of `rank`'s memory that corresponds to `pointer`, which lies in a window. INVALID_ARGUMENT
// for an address in no window.
//
// # Safety
//
// `peer` is NULL (an error) or can be written to.
symmpool_status symmpool_peer_pointer(symmpool_pool pool,
                                      uint32_t rank,
                                      const void *pointer,
                                      void **peer);

// The windows in the order of their offsets: writes at most `capacity` of them to `windows`, and the
// number of all windows to `count`. With a capacity of 0, `windows` may be NULL.
//
// # Safety
//
// `windows` can be written to for `capacity` entries; `count` is NULL (an error) or can be written
// to.
symmpool_status symmpool_windows(symmpool_pool pool,
                                 symmpool_window *windows,
                                 size_t capacity,
                                 size_t *count);

// Registers every window, and those of later commits, with a communicator of NCCL, an `ncclComm_t`
// whose ranks are those of the pool. Writes the number of windows to `count`, which may be NULL.
// Collective. The pool needs SYMMPOOL_PER_SEGMENT. UNSUPPORTED if no NCCL is loaded, if it is older than
// 2.27, or if it cannot make symmetric windows.
//
// # Safety
//
// `comm` is NULL (an error) or a communicator of the NCCL that this process has loaded, and lives
// until symmpool_unregister_nccl; `count` is NULL or can be written to.
symmpool_status symmpool_register_nccl(symmpool_pool pool,
                                       void *comm,
                                       uint64_t *count);

// Deregisters the windows from a communicator of NCCL. Collective; to be called before the communicator is
// destroyed. Errors as for symmpool_register_nccl.
symmpool_status symmpool_unregister_nccl(symmpool_pool pool,
                                         void *comm);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* SYMMPOOL_H */
