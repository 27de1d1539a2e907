/* Times MPI_Allreduce and MPI_Alltoall on float; the counterpart of `ours.rs`.
 * Arguments: target milliseconds a case, then cases like all_reduce:1024.
 * Rank 0 prints "result <op> <bytes> <microseconds> <wrong elements>". */
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static float value(uint32_t seed, uint32_t rank, uint32_t index) {
    uint32_t x = index * 2654435761u + rank * 2246822519u + seed * 3266489917u;
    return (float)(int32_t)(((x ^ (x >> 15)) * 2246822519u) >> 23) - 256.0f;
}

static int is_reduce;
static float *input, *output;
static int count, part;

static void call(void) {
    if (is_reduce)
        MPI_Allreduce(input, output, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    else
        MPI_Alltoall(input, part, MPI_FLOAT, output, part, MPI_FLOAT, MPI_COMM_WORLD);
}

static double slowest(double mine) {
    double all;
    MPI_Allreduce(&mine, &all, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return all;
}

static double repeat(long calls) {
    MPI_Barrier(MPI_COMM_WORLD);
    double start = MPI_Wtime();
    for (long i = 0; i < calls; i++) call();
    return slowest((MPI_Wtime() - start) / (double)calls);
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    int rank, world;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world);
    double target = argc > 1 ? atof(argv[1]) / 1e3 : 0.05;
    for (int a = 2; a < argc; a++) {
        char op[32];
        long bytes;
        if (sscanf(argv[a], "%31[^:]:%ld", op, &bytes) != 2) MPI_Abort(MPI_COMM_WORLD, 2);
        is_reduce = strcmp(op, "all_reduce") == 0;
        count = (int)(bytes / 4);
        part = count / world;
        input = aligned_alloc(4096, (size_t)(bytes + 4095) / 4096 * 4096);
        output = aligned_alloc(4096, (size_t)(bytes + 4095) / 4096 * 4096);
        if (!input || !output) MPI_Abort(MPI_COMM_WORLD, 3);
        for (int i = 0; i < count; i++) input[i] = value(bytes, rank, i);
        memset(output, 0, bytes);
        call();
        double each = repeat(3);
        double calls = target / each;
        double us = repeat(calls < 3 ? 3 : calls > 20000 ? 20000 : (long)calls) * 1e6;
        long wrong = 0, all;
        for (int i = 0; i < (is_reduce ? count : part * world); i++) {
            float expected = 0;
            if (is_reduce)
                for (int r = 0; r < world; r++) expected += value(bytes, r, i);
            else
                expected = value(bytes, i / part, rank * part + i % part);
            wrong += output[i] != expected;
        }
        MPI_Reduce(&wrong, &all, 1, MPI_LONG, MPI_SUM, 0, MPI_COMM_WORLD);
        if (rank == 0) {
            printf("result %s %ld %.4f %ld\n", op, bytes, us, all);
            fflush(stdout);
        }
        free(input);
        free(output);
    }
    MPI_Finalize();
    return 0;
}
