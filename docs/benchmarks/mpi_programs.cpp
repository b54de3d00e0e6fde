// The examples sample_sort and heat_3d with MPI: the same steps on the same data.
//
//     mpicxx -O3 -o mpi_programs docs/benchmarks/mpi_programs.cpp
//     mpirun -n 2 ./mpi_programs sort 5000000
//     mpirun -n 2 ./mpi_programs heat 64 1000
#include <mpi.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

using Keys = std::vector<uint64_t>;
static int rank_, ranks;

// Up to `count` of the values, at equal distances.
static Keys evenly(const Keys& values, size_t count) {
    count = std::min(count, values.size());
    Keys some(count);
    for (size_t i = 0; i < count; i++) some[i] = values[i * values.size() / count];
    return some;
}

// Blocks whose lengths the ranks tell each other first.
static Keys move_blocks(const Keys& keys, std::vector<int> counts) {
    std::vector<int> theirs(ranks), from(ranks), to(ranks);
    MPI_Alltoall(counts.data(), 1, MPI_INT, theirs.data(), 1, MPI_INT, MPI_COMM_WORLD);
    for (int r = 1; r < ranks; r++) from[r] = from[r - 1] + counts[r - 1], to[r] = to[r - 1] + theirs[r - 1];
    Keys got(to[ranks - 1] + theirs[ranks - 1]);
    MPI_Alltoallv(keys.data(), counts.data(), from.data(), MPI_UINT64_T, got.data(), theirs.data(), to.data(), MPI_UINT64_T, MPI_COMM_WORLD);
    return got;
}

static void sort(size_t count) {
    Keys keys(count);
    uint64_t state = (uint64_t)rank_ << 32;
    for (auto& key : keys) {
        state += 0x9e3779b97f4a7c15;
        uint64_t z = (state ^ state >> 30) * 0xbf58476d1ce4e5b9;
        z = (z ^ z >> 27) * 0x94d049bb133111eb;
        key = z ^ z >> 31;
    }
    MPI_Barrier(MPI_COMM_WORLD);
    double start = MPI_Wtime();
    std::sort(keys.begin(), keys.end());
    Keys mine = evenly(keys, 32 * ranks), all(mine.size() * ranks);
    MPI_Allgather(mine.data(), mine.size(), MPI_UINT64_T, all.data(), mine.size(), MPI_UINT64_T, MPI_COMM_WORLD);
    std::sort(all.begin(), all.end());
    Keys borders = evenly(all, ranks);
    std::vector<int> counts(ranks);
    size_t begin = 0;
    for (int r = 0; r < ranks; r++) {
        size_t end = r + 1 < ranks ? std::lower_bound(keys.begin(), keys.end(), borders[r + 1]) - keys.begin() : count;
        counts[r] = end - begin, begin = end;
    }
    Keys sorted = move_blocks(keys, counts);
    std::stable_sort(sorted.begin(), sorted.end());
    MPI_Barrier(MPI_COMM_WORLD);
    double seconds = MPI_Wtime() - start;
    if (!std::is_sorted(sorted.begin(), sorted.end())) MPI_Abort(MPI_COMM_WORLD, 1);
    if (rank_ == 0) printf("%zu keys in %.3f s: %.1f million/s\n", count * ranks, seconds, count * ranks / seconds / 1e6);
}

static void heat(int cells, int steps) {
    int sizes[3] = {}, periodic[3] = {1, 1, 1}, place[3], own[3], begin[3], shape[3];
    MPI_Comm grid;
    MPI_Dims_create(ranks, 3, sizes);
    MPI_Cart_create(MPI_COMM_WORLD, 3, sizes, periodic, 0, &grid);
    MPI_Cart_coords(grid, rank_, 3, place);
    for (int d = 0; d < 3; d++) {
        begin[d] = place[d] * cells / sizes[d];
        own[d] = (place[d] + 1) * cells / sizes[d] - begin[d], shape[d] = own[d] + 2;
    }
    // Of each dimension a layer, with the halo of those before.
    MPI_Datatype layers[3];
    for (int d = 0; d < 3; d++) {
        int part[3], nowhere[3] = {0, 0, 0};
        for (int e = 0; e < 3; e++) part[e] = e == d ? 1 : shape[e];
        MPI_Type_create_subarray(3, shape, part, nowhere, MPI_ORDER_C, MPI_DOUBLE, &layers[d]);
        MPI_Type_commit(&layers[d]);
    }
    const long columns = shape[2], plane = (long)shape[1] * columns, strides[3] = {plane, columns, 1};
    std::vector<double> now((size_t)shape[0] * plane), next(now.size());
    const double tau = 2 * acos(-1.0);
    auto wave = [&](int x, int y, int z) {
        return cos(tau * (begin[0] + x) / cells) * cos(tau * (begin[1] + y) / cells) * cos(tau * (begin[2] + z) / cells);
    };
    for (int x = 0; x < own[0]; x++)
        for (int y = 0; y < own[1]; y++)
            for (int z = 0; z < own[2]; z++) now[(x + 1) * plane + (y + 1) * columns + z + 1] = wave(x, y, z);
    double start = MPI_Wtime();
    for (int step = 0; step < steps; step++) {
        for (int d = 0; d < 3; d++) {
            int before, after;
            MPI_Cart_shift(grid, d, 1, &before, &after);
            double* p = now.data();
            const long stride = strides[d];
            MPI_Sendrecv(p + own[d] * stride, 1, layers[d], after, 0, p, 1, layers[d], before, 0, grid, MPI_STATUS_IGNORE);
            MPI_Sendrecv(p + stride, 1, layers[d], before, 1, p + (own[d] + 1) * stride, 1, layers[d], after, 1, grid, MPI_STATUS_IGNORE);
        }
        const double* h = now.data();
        for (long x = 1; x <= own[0]; x++)
            for (long y = 1; y <= own[1]; y++)
                for (long c = x * plane + y * columns + 1; c <= x * plane + y * columns + own[2]; c++) {
                    double around = h[c - 1] + h[c + 1] + h[c - columns] + h[c + columns] + h[c - plane] + h[c + plane];
                    next[c] = h[c] + 0.1 * (around - 6.0 * h[c]);
                }
        now.swap(next);
    }
    double seconds = MPI_Wtime() - start, scale = pow(1.0 + 0.6 * (cos(tau / cells) - 1.0), steps), error = 0;
    for (int x = 0; x < own[0]; x++)
        for (int y = 0; y < own[1]; y++)
            for (int z = 0; z < own[2]; z++)
                error = std::max(error, fabs(now[(x + 1) * plane + (y + 1) * columns + z + 1] - scale * wave(x, y, z)));
    if (error > 1e-9) MPI_Abort(MPI_COMM_WORLD, 1);
    if (rank_ == 0) printf("%d^3 cells, %d steps: %.0f million cells/s\n", cells, steps, pow(cells, 3) * steps / seconds / 1e6);
}

int main(int argc, char** argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (argc > 2 && !strcmp(argv[1], "sort"))
        sort(atoll(argv[2]));
    else if (argc > 3)
        heat(atoi(argv[2]), atoi(argv[3]));
    MPI_Finalize();
}
