// A fake of the part of NCCL that registers windows, with a log of the calls.

#include <pthread.h>
#include <stddef.h>

struct comm {
  int rank, count, state;
};
struct call {
  int rank;
  char what;
  void *address;
  size_t bytes;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct call calls[4096];
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int made, version = 22809, mode, failing_rank = -1, held;

// Modes: 0 works, 1 windows are NULL, 2 registering fails on a rank, 3 communicators do not block, 4 registering and 5
// deregistering does not return on a rank until the mode changes.
void fake_set(int new_version, int new_mode, int rank) {
  pthread_mutex_lock(&lock);
  version = new_version;
  mode = new_mode;
  failing_rank = rank;
  made = 0;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
}

// Calls that have not returned.
int fake_held(void) {
  pthread_mutex_lock(&lock);
  int now = held;
  pthread_mutex_unlock(&lock);
  return now;
}

static void hold(struct comm *comm, int holding) {
  pthread_mutex_lock(&lock);
  held++;
  while (mode == holding && comm->rank == failing_rank) pthread_cond_wait(&changed, &lock);
  held--;
  pthread_mutex_unlock(&lock);
}

int fake_calls(struct call *out, int capacity) {
  for (int i = 0; i < made && i < capacity; i++) out[i] = calls[i];
  return made;
}

static void note(struct comm *comm, char what, void *address, size_t bytes) {
  pthread_mutex_lock(&lock);
  if (made < 4096) calls[made++] = (struct call){comm->rank, what, address, bytes};
  pthread_mutex_unlock(&lock);
}

int ncclGetVersion(int *out) {
  *out = version;
  return 0;
}
int ncclCommCount(struct comm *comm, int *out) {
  *out = comm->count;
  return 0;
}
int ncclCommUserRank(struct comm *comm, int *out) {
  *out = comm->rank;
  return 0;
}
int ncclCommGetAsyncError(struct comm *comm, int *out) {
  *out = comm->state > 0 ? 7 : 0;
  if (comm->state > 0) comm->state--;
  return 0;
}
int ncclCommWindowRegister(struct comm *comm, void *address, size_t bytes, void **window, int flags) {
  if (flags != 1) return 4;
  if (mode == 2 && comm->rank == failing_rank) return 5;
  hold(comm, 4);
  note(comm, '+', address, bytes);
  *window = mode == 1 ? NULL : address;
  if (mode == 3) {
    comm->state = 3;
    return 7;
  }
  return 0;
}
int ncclCommWindowDeregister(struct comm *comm, void *window) {
  hold(comm, 5);
  note(comm, '-', window, 0);
  return 0;
}
const char *ncclGetErrorString(int code) { return code == 5 ? "invalid usage" : "some error"; }
const char *ncclGetLastError(struct comm *comm) { return comm ? "a registration that must fail" : ""; }
