// What an MPI's windows cost: the example one_sided_overhead of phalanx, in C.
//
//     mpicc -O2 one_sided.c -o one_sided && mpirun -n 2 ./one_sided
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

enum { ROUNDS = 41 };
static const size_t SIZES[] = {8, 64, 1 << 10, 16 << 10, 256 << 10, 4 << 20};

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// The median of rounds of so many accesses each: nanoseconds of one.
static double median(int kind, size_t bytes, char *buffer, MPI_Win window) {
    double rounds[ROUNDS];
    int times = bytes < 1 << 20 ? 1000 : 20;
    for (int round = 0; round < ROUNDS; round++) {
        double began = MPI_Wtime();
        for (int i = 0; i < times; i++) {
            long one = 1, before;
            if (kind == 0) MPI_Put(buffer, bytes, MPI_BYTE, 1, 0, bytes, MPI_BYTE, window);
            if (kind == 1) MPI_Get(buffer, bytes, MPI_BYTE, 1, 0, bytes, MPI_BYTE, window);
            if (kind == 2) MPI_Fetch_and_op(&one, &before, MPI_LONG, 1, 0, MPI_SUM, window);
            MPI_Win_flush(1, window);
        }
        rounds[round] = (MPI_Wtime() - began) * 1e9 / times;
    }
    qsort(rounds, ROUNDS, sizeof *rounds, compare);
    return rounds[ROUNDS / 2];
}

int main(int argc, char **argv) {
    int rank;
    char *base, *buffer = malloc(SIZES[5]);
    MPI_Win window;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Win_allocate(SIZES[5], 1, MPI_INFO_NULL, MPI_COMM_WORLD, &base, &window);
    MPI_Win_lock_all(0, window);
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0) {
        for (size_t i = 0; i < SIZES[5]; i++) buffer[i] = 1;
        for (int i = 0; i < 6; i++)
            printf("%8zu bytes: put %9.1f get %9.1f\n", SIZES[i], median(0, SIZES[i], buffer, window),
                   median(1, SIZES[i], buffer, window));
        printf("fetch and add %.1f\n", median(2, 8, buffer, window));
    }
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Win_unlock_all(window);
    MPI_Win_free(&window);
    MPI_Finalize();
    return 0;
}
