// NVSHMEM's own host calls, measured as `phalanx perf put|get|put_signal` measures: the bare peer of docs/benchmarks/nvshmem.md.
//
//   W=$(python3 -c 'import nvidia.nvshmem as n; print(list(n.__path__)[0])')   # or an installation of NVSHMEM
//   g++ -O2 -o nvshmembench nvshmembench.cpp -I$W/include -I$CUDA_HOME/include -I$CUDA_HOME/include/cccl \
//       -L$W/lib -l:libnvshmem_host.so.3 -L$CUDA_HOME/lib64 -lcudart -Wl,-rpath,$W/lib
//   ./nvshmembench PES put|get|put_signal MINBYTES MAXBYTES ITERATIONS
//
// It starts a process for each PE. The time is the average of a loop that enqueues every iteration on a stream and then
// waits for it (with a quiet), the mean of all PEs; each turn uses the next part of the buffers. p50 is the median of the
// times between CUDA events around each iteration in a second loop, where the slowest PE counts.
#include <cuda_runtime.h>
#include <nvshmem_host.h>

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <vector>

#define CHECK(call)                                                                       \
    do {                                                                                  \
        int code = (int)(call);                                                           \
        if (code) { fprintf(stderr, "%s:%d: %s answered %d\n", __FILE__, __LINE__, #call, code); exit(1); } \
    } while (0)

enum { MOST_PES = 16, MOST_ITERATIONS = 20000, WARMUP = 20 };

// What the processes share: a barrier, the unique id, and their times.
struct Shared {
    std::atomic<int> arrived, round;
    nvshmemx_uniqueid_t id;
    double average[MOST_PES], times[MOST_PES][MOST_ITERATIONS];
};

static Shared* shared;
static int pes, me;

static void meet() {
    int round = shared->round.load();
    if (shared->arrived.fetch_add(1) + 1 == pes) {
        shared->arrived = 0;
        shared->round = round + 1;
    }
    while (shared->round.load() == round) sched_yield();
}

static double now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

static void run(const char* operation, size_t least, size_t most, int iterations) {
    CHECK(cudaSetDevice(me));
    CHECK(cudaFree(0));
    if (me == 0) {
        shared->id = NVSHMEMX_UNIQUEID_INITIALIZER;
        CHECK(nvshmemx_get_uniqueid(&shared->id));
    }
    meet();
    nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
    nvshmemx_uniqueid_t id = shared->id;
    CHECK(nvshmemx_set_attr_uniqueid_args(me, pes, &id, &attributes));
    CHECK(nvshmemx_hostlib_init_attr(NVSHMEMX_INIT_WITH_UNIQUEID, &attributes));
    if (nvshmemx_init_status() < NVSHMEM_STATUS_IS_INITIALIZED) exit(1);

    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    char *send = (char*)nvshmem_calloc(most + 256, 1), *recv = (char*)nvshmem_calloc(most + 256, 1);
    uint64_t *signal = (uint64_t*)nvshmem_calloc(8, 1), calls = 0;
    int next = (me + 1) % pes;
    bool put = !strcmp(operation, "put"), get = !strcmp(operation, "get");
    auto call = [&](size_t at, size_t bytes) {
        if (put) {
            nvshmemx_putmem_on_stream(recv + at, send + at, bytes, next, stream);
        } else if (get) {
            nvshmemx_getmem_on_stream(recv + at, send + at, bytes, next, stream);
        } else {
            nvshmemx_putmem_signal_on_stream(recv + at, send + at, bytes, signal, 1, NVSHMEM_SIGNAL_ADD, next, stream);
            nvshmemx_signal_wait_until_on_stream(signal, NVSHMEM_CMP_GE, ++calls, stream);
        }
    };
    auto wait = [&] {
        cudaEvent_t end;
        nvshmemx_quiet_on_stream(stream);
        CHECK(cudaEventCreateWithFlags(&end, cudaEventDisableTiming));
        CHECK(cudaEventRecord(end, stream));
        while (cudaEventQuery(end) == cudaErrorNotReady) sched_yield();
        CHECK(cudaEventDestroy(end));
    };

    if (me == 0) printf("# %s, %d PEs, %d iterations\n%12s %12s %12s %12s\n", operation, pes, iterations, "bytes", "time us", "GB/s", "p50 us");
    for (size_t bytes = least; bytes <= most; bytes *= 4) {
        size_t parts = most / bytes;
        for (int i = 0; i < WARMUP; ++i) call(i % parts * bytes, bytes);
        wait();
        meet();
        double start = now();
        for (int i = 0; i < iterations; ++i) call(i % parts * bytes, bytes);
        wait();
        shared->average[me] = (now() - start) / iterations;

        std::vector<cudaEvent_t> events(iterations + 1);
        for (auto& event : events) CHECK(cudaEventCreate(&event));
        meet();
        CHECK(cudaEventRecord(events[0], stream));
        for (int i = 0; i < iterations; ++i) {
            call(i % parts * bytes, bytes);
            CHECK(cudaEventRecord(events[i + 1], stream));
        }
        wait();
        for (int i = 0; i < iterations; ++i) {
            float milliseconds;
            CHECK(cudaEventElapsedTime(&milliseconds, events[i], events[i + 1]));
            shared->times[me][i] = milliseconds / 1e3;
        }
        for (auto& event : events) CHECK(cudaEventDestroy(event));
        meet();
        if (me == 0) {
            double time = 0;
            std::vector<double> slowest(iterations, 0.0);
            for (int pe = 0; pe < pes; ++pe) {
                time += shared->average[pe] / pes;
                for (int i = 0; i < iterations; ++i) slowest[i] = std::max(slowest[i], shared->times[pe][i]);
            }
            std::sort(slowest.begin(), slowest.end());
            printf("%12zu %12.2f %12.2f %12.2f\n", bytes, time * 1e6, bytes / time / 1e9, slowest[iterations / 2] * 1e6);
            fflush(stdout);
        }
        meet();
    }
    nvshmem_free(send);
    nvshmem_free(recv);
    nvshmem_free(signal);
    nvshmemx_hostlib_finalize();
}

int main(int count, char** arguments) {
    if (count != 6) {
        fprintf(stderr, "usage: %s PES put|get|put_signal MINBYTES MAXBYTES ITERATIONS\n", arguments[0]);
        return 2;
    }
    pes = atoi(arguments[1]);
    int iterations = atoi(arguments[5]);
    if (pes < 1 || pes > MOST_PES || iterations < 1 || iterations > MOST_ITERATIONS) return 2;
    void* memory = mmap(0, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return 1;
    shared = new (memory) Shared();
    for (me = 0; me < pes; ++me) {
        if (fork() == 0) {
            run(arguments[2], strtoull(arguments[3], 0, 0), strtoull(arguments[4], 0, 0), iterations);
            return 0;
        }
    }
    int failed = 0, status;
    while (wait(&status) > 0) failed |= status;
    return failed != 0;
}
