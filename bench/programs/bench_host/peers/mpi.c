/* Times MPI_Allreduce, MPI_Alltoall and MPI_Alltoallv on float; the counterpart of `ours.rs`.
 * Arguments: target milliseconds for each case, then cases like all_reduce:1024. Those of all_to_all_v
 * have what each rank sends to each, row by row: all_to_all_v/one-hot:1024:256,0,256,0.
 * Rank 0 prints "result <op> <bytes> <microseconds> <wrong elements>". */
#include <math.h>
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static float value(uint32_t seed, uint32_t rank, uint32_t index) {
    uint32_t x = index * 2654435761u + rank * 2246822519u + seed * 3266489917u;
    return (float)(int32_t)(((x ^ (x >> 15)) * 2246822519u) >> 23) - 256.0f;
}

enum { MAX_RANKS = 64 };

static int is_reduce, is_uneven;
static float *input, *output;
static int count, part;
static int send[MAX_RANKS], send_at[MAX_RANKS], receive[MAX_RANKS], receive_at[MAX_RANKS];
/* Where the segment for this rank begins in each sender's input. */
static int begin[MAX_RANKS];

static void call(void) {
    if (is_reduce)
        MPI_Allreduce(input, output, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    else if (is_uneven)
        MPI_Alltoallv(input, send, send_at, MPI_FLOAT, output, receive, receive_at, MPI_FLOAT,
                      MPI_COMM_WORLD);
    else
        MPI_Alltoall(input, part, MPI_FLOAT, output, part, MPI_FLOAT, MPI_COMM_WORLD);
}

/* Reads the counts after the second colon. Returns what this rank sends or receives, whichever is more. */
static int read_counts(const char *text, int rank, int world) {
    int sent = 0, received = 0;
    for (int from = 0; from < world; from++) {
        int at = 0;
        for (int to = 0; to < world; to++) {
            char *end;
            int number = (int)strtol(text, &end, 10);
            if (end == text) MPI_Abort(MPI_COMM_WORLD, 4);
            text = *end == ',' ? end + 1 : end;
            if (from == rank) {
                send[to] = number;
                send_at[to] = at;
                sent += number;
            }
            if (to == rank) {
                receive[from] = number;
                receive_at[from] = received;
                begin[from] = at;
                received += number;
            }
            at += number;
        }
    }
    return sent > received ? sent : received;
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
        int counts = 0;
        if (sscanf(argv[a], "%31[^:]:%ld:%n", op, &bytes, &counts) != 2 || world > MAX_RANKS)
            MPI_Abort(MPI_COMM_WORLD, 2);
        is_reduce = strcmp(op, "all_reduce") == 0;
        is_uneven = strncmp(op, "all_to_all_v", 12) == 0;
        count = is_uneven ? read_counts(argv[a] + counts, rank, world) : (int)(bytes / 4);
        part = count / world;
        size_t room = ((size_t)count * 4 + 4096) / 4096 * 4096;
        input = aligned_alloc(4096, room);
        output = aligned_alloc(4096, room);
        if (!input || !output) MPI_Abort(MPI_COMM_WORLD, 3);
        for (int i = 0; i < count; i++) input[i] = value(bytes, rank, i);
        memset(output, 0, room);
        call();
        double calls = 3, each, more;
        for (;;) {
            each = repeat((long)calls);
            more = target / (each * calls);
            if (more <= 2 || calls >= 4e6) break;
            calls = ceil(calls * (more < 10 ? more : 10));
            if (calls > 4e6) calls = 4e6;
        }
        double us = each * 1e6;
        long wrong = 0, all;
        for (int r = 0; is_uneven && r < world; r++)
            for (int i = 0; i < receive[r]; i++)
                wrong += output[receive_at[r] + i] != value(bytes, r, begin[r] + i);
        for (int i = 0; i < (is_reduce ? count : is_uneven ? 0 : part * world); i++) {
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
