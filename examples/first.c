// A first all-reduce from C: every rank contributes its number plus one.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "symmpool.h"

static const char *HELP =
    "A first all-reduce from C: every rank contributes its number plus one.\n"
    "\n"
    "    cargo build --release -p symmpool-ffi\n"
    "    cc -Iffi/include examples/first.c -Ltarget/release -lsymmpool -Wl,-rpath,$PWD/target/release -o first\n"
    "    export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500\n"
    "    RANK=0 ./first & RANK=1 ./first; wait\n"
    "\n"
    "Ranks are processes on one host, and the memory is the host's. Any launcher that sets these variables will do.\n";

// Ends the program with the text of the last error, which names the rank and says what to do.
static void check(symmpool_status status) {
  const char *why = NULL;
  if (status == SYMMPOOL_STATUS_OK) return;
  symmpool_last_error(&why);
  fprintf(stderr, "first: %s\n", why ? why : "");
  exit(1);
}

int main(int argc, char **argv) {
  enum { COUNT = 1 << 20, SECONDS = 60 };
  if (argc > 1) {
    int wants_help = strcmp(argv[1], "--help") == 0;
    fputs(HELP, wants_help ? stdout : stderr);
    return wants_help ? 0 : 2;
  }

  uint32_t rank = 0, world = 0;
  symmpool_group group = 0;
  symmpool_pool pool = 0;
  symmpool_comm comm = 0;
  check(symmpool_group_from_env(SECONDS, &group));
  check(symmpool_group_size(group, &rank, &world));
  check(symmpool_pool_create(group, "cpu", 0, 0, &pool));  // "cuda" is the GPU LOCAL_RANK
  check(symmpool_comm_create(pool, SECONDS, &comm));

  // Every rank must allocate the same blocks in the same order: then they lie at the same place.
  float *x = NULL;
  check(symmpool_alloc(pool, COUNT * sizeof *x, 0, NULL, (void **)&x));
  for (int i = 0; i < COUNT; i++) x[i] = (float)(rank + 1);

  // The sum, in place. The call commits the new memory first, and returns when the work is done. On a GPU it takes a
  // stream in place of NULL, and symmpool_comm_synchronize waits.
  check(symmpool_all_reduce(comm, x, x, COUNT, SYMMPOOL_DTYPE_F32, SYMMPOOL_OP_SUM, NULL));
  printf("rank %u of %u: %g\n", rank, world, x[COUNT - 1]);

  check(symmpool_free(pool, x));
  check(symmpool_comm_destroy(comm));
  check(symmpool_pool_destroy(pool));
  check(symmpool_group_destroy(group));
  return 0;
}
