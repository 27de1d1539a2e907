#ifndef SYMMPOOL_H
#define SYMMPOOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Symmetric memory for several ranks, and collectives on it.
//
// Made from ffi/src/capi; do not edit. Functions may be called from any thread, and return what
// came of them; symmpool_last_error says why. Handles are numbers that are never used twice: one that
// was destroyed is an INVALID_ARGUMENT.
//
// For allocators that take plain functions there are also, for N from 0 to 63 (see
// symmpool_slot_bind):
//
//     void *symmpool_alloc_N(ssize_t size, int device, cudaStream_t stream);
//     void symmpool_free_N(void *pointer, size_t size, int device, cudaStream_t stream);


// A flag of symmpool_pool_create: several ranks may use one GPU.
#define SYMMPOOL_SHARED_DEVICE 1

// A flag of symmpool_pool_create: every block lies in one physical allocation, as NCCL before
// 2.30.3 needs of its windows. Packs less tightly.
#define SYMMPOOL_PER_SEGMENT 2

// What a call came to. Each error stands for one thing a caller can do about it.
typedef enum {
  // It was done.
  SYMMPOOL_STATUS_OK = 0,
  // An argument makes no sense, NULL among them; nothing was changed.
  SYMMPOOL_STATUS_INVALID_ARGUMENT = 1,
  // Memory, address range or a limit is used up.
  SYMMPOOL_STATUS_OUT_OF_MEMORY = 2,
  // Ranks did different things, or were configured differently.
  SYMMPOOL_STATUS_DIVERGED = 3,
  // A deadline passed before other ranks came.
  SYMMPOOL_STATUS_TIMEOUT = 4,
  // A peer's process is gone.
  SYMMPOOL_STATUS_PEER_LOST = 5,
  // This machine, library or build cannot do it.
  SYMMPOOL_STATUS_UNSUPPORTED = 6,
  // Wrong secret, wrong protocol version, wrong user.
  SYMMPOOL_STATUS_REFUSED = 7,
  // The call does not fit the current state, such as a commit within a commit.
  SYMMPOOL_STATUS_INVALID_STATE = 8,
  // The operating system or a device library failed.
  SYMMPOOL_STATUS_SYSTEM = 9,
  // A defect of this library; the message says where.
  SYMMPOOL_STATUS_INTERNAL = 10,
} symmpool_status;

// Element types, for the `dtype` of collectives. The first ten can be reduced; the others are only
// moved, the last five in the place of any other element of so many bytes.
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

// Reductions, for the `op` of collectives. Results have the same bits on every rank.
typedef enum {
  SYMMPOOL_OP_SUM = 0,
  SYMMPOOL_OP_PROD = 1,
  SYMMPOOL_OP_MIN = 2,
  SYMMPOOL_OP_MAX = 3,
  SYMMPOOL_OP_AVG = 4,
} symmpool_op;

// Symmetric memory of one rank, and windows on its peers'. 0 is never one.
typedef uint64_t symmpool_pool;

// Collectives between the ranks of a pool. 0 is never one.
typedef uint64_t symmpool_comm;

// An ordered set of ranks, seen from one of them. 0 is never one.
typedef uint64_t symmpool_group;

// What a commit did.
typedef struct {
  // Its number, from 1.
  uint64_t number;
  // Windows that are new.
  uint64_t windows_added;
  // Windows that are gone.
  uint64_t windows_removed;
  // Blocks freed without order that came back.
  uint64_t blocks_returned;
} symmpool_commit_report;

// Where every rank's memory lies in this process: rank b's copy of an address p of rank a is
// p + (b - a) * stride.
typedef struct {
  // First address of slot 0.
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
  // Serial number of the segment in its lane.
  uint64_t counter;
} symmpool_window;

// A pool's numbers, in bytes and counts, over all lanes.
typedef struct {
  // Bytes handed out.
  uint64_t allocated;
  // Bytes of physical memory.
  uint64_t reserved;
  // Successful commits.
  uint64_t commits;
  // Windows now.
  uint64_t windows;
} symmpool_pool_stats;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The library's version, such as "0.1.0".
const char *symmpool_version(void);

// What this thread's latest failed call came to, and, if `text` is not NULL, why. The text is
// valid until the thread's next call fails.
//
// # Safety
//
// `text` is NULL or can be written to.
symmpool_status symmpool_last_error(const char **text);

// A communicator of all ranks of `pool`. Collective: every rank makes its communicators in the
// same order. `timeout` is how long its calls wait for a late rank, in seconds, or 0 for 30. What one
// rank asks for in vain is the error of all; the pool can be used after symmpool_resync.
//
// # Safety
//
// `comm` is NULL (an error) or can be written to.
symmpool_status symmpool_comm_create(symmpool_pool pool,
                                     double timeout,
                                     symmpool_comm *comm);

// Changes how long this rank's calls wait for a late rank, in seconds. Talks to nobody; a call under way
// keeps its time, and on CUDA so does what is on a stream already, or captured in a graph. Another thread
// may be in a call.
symmpool_status symmpool_comm_set_timeout(symmpool_comm comm,
                                          double timeout);

// Lets go of a communicator. Needs no agreement between ranks.
symmpool_status symmpool_comm_destroy(symmpool_comm comm);

// Reduces `count` elements of every rank's `input` into every rank's `output`, which may be the
// same address. As all collectives: every rank calls it with the same arguments but addresses, in
// the same order; memory in windows is used where it lies, other memory is copied; on CUDA the
// work is done on `stream` when the call has returned, and errors show in later calls or in
// symmpool_comm_synchronize. Errors: DIVERGED for other arguments elsewhere, TIMEOUT, PEER_LOST; after
// these two a peer that is still in the call may go on writing into `output` until it has left it.
//
// # Safety
//
// `input` can be read and `output` written for `count` elements by the CPU or, on CUDA, the
// device, and nobody else touches them until the work is done. `stream` is NULL or a stream that lives
// until symmpool_comm_forget_stream, or as long as the communicator.
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
// As symmpool_all_reduce, for these lengths.
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
// As symmpool_all_reduce; `output` has one part for each rank.
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
// As symmpool_all_reduce, for `data` as input and output.
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
// As symmpool_all_reduce, for these lengths.
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
// As symmpool_all_reduce, for the sums of the counts; the arrays can be read for as many entries
// as there are ranks.
symmpool_status symmpool_all_to_all_v(symmpool_comm comm,
                                      void *output,
                                      const void *input,
                                      const size_t *output_counts,
                                      const size_t *input_counts,
                                      uint32_t dtype,
                                      void *stream);

// Returns, or on CUDA lets `stream` go on, once every rank has called it. Errors as for
// symmpool_all_reduce.
//
// # Safety
//
// `stream` is NULL or a live stream.
symmpool_status symmpool_barrier(symmpool_comm comm, void *stream);

// Waits until this rank's calls on `stream` are done, and says what went wrong in them.
//
// # Safety
//
// `stream` is NULL or a live stream.
symmpool_status symmpool_comm_synchronize(symmpool_comm comm, void *stream);

// Lets go of a stream that is about to be destroyed: the communicator touches it no more unless a call names
// it again, and what was put on it keeps its place in the order of calls. Ranks need not do so alike. The
// pool remembers streams too: see symmpool_forget_stream. INVALID_STATE while the stream, if it has the
// communicator's last call, is being captured, and in a forked child.
//
// # Safety
//
// `stream` is NULL or a live stream.
symmpool_status symmpool_comm_forget_stream(symmpool_comm comm,
                                            void *stream);

// The group that a launcher describes in RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
// MASTER_PORT (and SYMMPOOL_PORT, SYMMPOOL_SECRET where they are set). `timeout` is how long its
// collective calls wait for other ranks, in seconds. Errors: INVALID_ARGUMENT for variables that
// are missing or wrong, TIMEOUT, REFUSED when a secret differs.
//
// # Safety
//
// `group` is NULL (an error) or can be written to.
symmpool_status symmpool_group_from_env(double timeout, symmpool_group *group);

// A group that meets over TCP at `address`, "HOST:PORT", which rank 0 serves. `secret` may be NULL
// on a loopback address; otherwise it is the same on every rank. `timeout` and errors as for
// symmpool_group_from_env.
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

// A group that meets in files of `directory`, which all ranks see and nobody else uses. `timeout`
// as for symmpool_group_from_env.
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

// Lets go of a group. Pools made of it keep what they need.
symmpool_status symmpool_group_destroy(symmpool_group group);

// Makes a pool together with the other ranks of `group`, which call this with the same settings.
// `device` is "cpu", "cuda:N", "cuda" (device LOCAL_RANK), or NULL: a CUDA device if there is one,
// else the CPU. `stride` is the address space of a rank in bytes, a multiple of 2 MiB, or 0 for
// 1 TiB. `flags` are SYMMPOOL_SHARED_DEVICE and SYMMPOOL_PER_SEGMENT. Errors: DIVERGED for other
// settings elsewhere, UNSUPPORTED where memory cannot travel, TIMEOUT and PEER_LOST. What one rank
// cannot do, or was asked in vain, is the error of all.
//
// # Safety
//
// `device` is NULL or a C string, `pool` is NULL (an error) or can be written to.
symmpool_status symmpool_pool_create(symmpool_group group,
                                     const char *device,
                                     uint64_t stride,
                                     uint32_t flags,
                                     symmpool_pool *pool);

// Lets go of a pool. Its memory goes too, once no communicator, slot or call uses the pool.
symmpool_status symmpool_pool_destroy(symmpool_pool pool);

// Allocates `bytes` at a multiple of `align` (a power of two up to 2 MiB; 0 for 512) for use on
// `stream`, a CUstream, NULL for the default one and in host memory. Talks to no other rank; every
// rank makes the same calls in the same order. Errors: OUT_OF_MEMORY, INVALID_ARGUMENT, INVALID_STATE in
// a child that was forked from the pool's process.
//
// # Safety
//
// `stream` is NULL or a stream of the pool's device that lives until symmpool_forget_stream, or as long as
// the pool; `pointer` is NULL (an error) or can be
// written to.
symmpool_status symmpool_alloc(symmpool_pool pool,
                               size_t bytes,
                               uint64_t align,
                               void *stream,
                               void **pointer);

// Frees a block as part of the sequence: every rank does so at the same place, and its memory may
// be used again by the next call. INVALID_ARGUMENT for anything that is no live block.
symmpool_status symmpool_free(symmpool_pool pool, void *pointer);

// Frees a block at a time that differs between ranks. Its memory is used again after the commit by
// which every rank has freed it. INVALID_ARGUMENT for anything that is no live block.
symmpool_status symmpool_free_unordered(symmpool_pool pool, void *pointer);

// Notes that a block is used on `stream` too: its memory is used again only behind that work.
// INVALID_ARGUMENT for anything that is no live block.
//
// # Safety
//
// As for symmpool_alloc.
symmpool_status symmpool_record_stream(symmpool_pool pool, void *pointer, void *stream);

// Makes sure that `bytes` more fit on `stream`, as one block, without growing. Every rank calls it
// at the same place. Errors as for symmpool_alloc.
//
// # Safety
//
// As for symmpool_alloc.
symmpool_status symmpool_reserve(symmpool_pool pool, uint64_t bytes, void *stream);

// Lets go of a stream that is about to be destroyed. A pool remembers the streams that it was given, up to
// 64, and touches them until then; what was theirs goes to the next stream that is new to the pool. Every
// rank calls it at the same place. Nothing happens for a stream that the pool does not know. Errors:
// INVALID_STATE while the stream is being captured, and in a forked child.
//
// # Safety
//
// `stream` is NULL or a live stream of the pool's device.
symmpool_status symmpool_forget_stream(symmpool_pool pool,
                                       void *stream);

// Checks that all ranks did the same, and makes windows of new memory. Collective. `report` may be
// NULL. Errors: DIVERGED, saying where ranks differ, TIMEOUT, PEER_LOST, INVALID_STATE while a
// stream is being captured or another thread commits, and what another rank could not do, or asked
// for in vain; then nothing is shared, and the pool can be used after symmpool_resync.
//
// # Safety
//
// `report` is NULL or can be written to.
symmpool_status symmpool_commit(symmpool_pool pool, symmpool_commit_report *report);

// Whether the pool has grown since the last commit, or much that was freed waits to be taken back; the same on
// every rank.
//
// # Safety
//
// `due` is NULL (an error) or can be written to.
symmpool_status symmpool_is_commit_due(symmpool_pool pool,
                                       bool *due);

// Agrees on a state again after DIVERGED. Collective. What was allocated since must have been
// freed.
symmpool_status symmpool_resync(symmpool_pool pool);

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

// `rank`'s copy of an address inside a window. INVALID_ARGUMENT for an address in none.
//
// # Safety
//
// `peer` is NULL (an error) or can be written to.
symmpool_status symmpool_peer_pointer(symmpool_pool pool,
                                      uint32_t rank,
                                      const void *pointer,
                                      void **peer);

// The windows by offset: writes at most `capacity` of them to `windows`, and how many there are
// to `count`. With a capacity of 0, `windows` may be NULL.
//
// # Safety
//
// `windows` can be written to for `capacity` entries; `count` is NULL (an error) or can be written
// to.
symmpool_status symmpool_windows(symmpool_pool pool,
                                 symmpool_window *windows,
                                 size_t capacity,
                                 size_t *count);

// The pool's numbers.
//
// # Safety
//
// `stats` is NULL (an error) or can be written to.
symmpool_status symmpool_stats(symmpool_pool pool, symmpool_pool_stats *stats);

// Registers every window, those of later commits too, with a communicator of NCCL, an `ncclComm_t`
// whose ranks are those of the pool. `count`, which may be NULL, is how many windows there are now.
// Collective. The pool needs SYMMPOOL_PER_SEGMENT. UNSUPPORTED where no NCCL is loaded, where it is
// older than 2.27, or where it makes no symmetric windows.
//
// # Safety
//
// `comm` is NULL (an error) or a communicator of the NCCL that this process has loaded, and lives
// until symmpool_unregister_nccl; `count` is NULL or can be written to.
symmpool_status symmpool_register_nccl(symmpool_pool pool, void *comm, uint64_t *count);

// Takes the windows back from a communicator of NCCL. Collective; before it is destroyed. Errors as for
// symmpool_register_nccl.
symmpool_status symmpool_unregister_nccl(symmpool_pool pool,
                                         void *comm);

// Puts the pool behind a slot: symmpool_alloc_N and symmpool_free_N, N being `slot`, then serve its
// memory to allocators that take plain functions, such as torch's CUDAPluggableAllocator. Their
// frees are without order. INVALID_STATE when all 64 slots are in use.
//
// # Safety
//
// `slot` is NULL (an error) or can be written to.
symmpool_status symmpool_slot_bind(symmpool_pool pool, uint32_t *slot);

// Closes a slot to allocations. It keeps its pool until all that it handed out is freed.
// INVALID_ARGUMENT for a slot that is not bound.
symmpool_status symmpool_slot_release(uint32_t slot);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* SYMMPOOL_H */
