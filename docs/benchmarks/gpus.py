"""Tables of phalanx beside nccl-tests on this machine's GPUs: phalanx's time in µs, and over the best of plain, registered and
symmetric buffers (`-R 0`, `1` and `2`) of nccl-tests. All programs in turns; each checks its results.

    cargo build --release -p phalanx-cli
    python3 docs/benchmarks/gpus.py --ranks 4 --nccl-tests nccl-tests/build

Modes: `graph` (calls in a CUDA graph of 20) and `eager` (one by one), to 64 MiB; `long`, to 4 GiB; `algorithms`: each of phalanx's
own algorithms, in a graph, for the limits between them.
"""

import argparse
import os
import pathlib
import subprocess
import time

PROGRAMS = {"all_to_all": "alltoall", "send_recv": "sendrecv"}
# Where a rank has no blocks for others; elsewhere the least is 64.
SMALLEST = {"all_reduce": 8, "broadcast": 8, "reduce": 8, "send_recv": 8}
ALGORITHMS = ["ll", "ll128", "two_hops_ll", "two_hops_ll128", "nccl"]
TWO_HOPS = ["all_reduce"]
MODES = {
    "graph": ["-e", "64M", "-f", "2", "-n", "20", "-w", "5", "-G", "20"],
    "eager": ["-e", "64M", "-f", "4", "-n", "100", "-w", "20"],
    "long": ["-e", "4G", "-f", "4", "-n", "5", "-w", "2"],
}


def run(words):
    """Microseconds by size, and what was wrong."""
    times = {}
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    except subprocess.TimeoutExpired:
        print(f"{' '.join(map(str, words))}: not ended after 240 s")
        return times
    for line in done.stdout.splitlines():
        cells = line.split()
        if len(cells) > 8 and cells[0].isdigit() and int(cells[0]) > 0:
            if cells[8] not in ("0", "N/A"):
                print(f"WRONG: {' '.join(map(str, words))}: {line}")
            times[int(cells[0])] = float(cells[5])
    if done.returncode != 0 or not times:
        print(f"{' '.join(map(str, words))}: exit {done.returncode}\n{done.stdout[-800:]}{done.stderr[-1500:]}")
    return times


def table(title, rows):
    print(f"\n{title}\n")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print(flush=True)


def size_name(size):
    for shift, unit in ((30, "Gi"), (20, "Mi"), (10, "Ki")):
        if size >= 1 << shift and size % (1 << shift) == 0:
            return f"{size >> shift} {unit}"
    return str(size)


def compare(args, operation, mode):
    least = ["-b", "64M" if mode == "long" else str(SMALLEST.get(operation, 64))]
    common = ["-t", str(args.ranks), *least, *MODES[mode]]
    theirs = args.nccl_tests / f"{PROGRAMS.get(operation, operation)}_perf"
    peers = {way: run([theirs, "-g", "1", "-c", "1", "-R", str(way), *common]) for way in args.ways}
    ours = run([args.phalanx, "perf", operation, *common])
    sizes = sorted(size for size in ours if any(size in times for times in peers.values()))
    best = {size: min(times[size] for times in peers.values() if size in times) for size in sizes}
    rows = [
        ["bytes", *map(size_name, sizes)],
        ["---"] * (len(sizes) + 1),
        ["phalanx, µs", *(f"{ours[size]:.2f}" for size in sizes)],
        *([f"-R {way}, µs", *(f"{times.get(size, float('nan')):.2f}" for size in sizes)] for way, times in peers.items()),
        ["ratio", *(f"{ours[size] / best[size]:.2f}" for size in sizes)],
    ]
    table(f"{operation}, {mode}", rows)


def algorithms(args, operation):
    common = ["-t", str(args.ranks), "-b", str(SMALLEST.get(operation, 64)), *MODES["graph"]]
    names = [name for name in ALGORITHMS if operation in TWO_HOPS or not name.startswith("two_hops")]
    times = {name: run([args.phalanx, "perf", operation, "--algorithm", name, *common]) for name in names}
    sizes = sorted({size for by_size in times.values() for size in by_size})
    rows = [["bytes", *map(size_name, sizes)], ["---"] * (len(sizes) + 1)]
    rows += [[name, *(f"{by_size.get(size, float('nan')):.2f}" for size in sizes)] for name, by_size in times.items()]
    table(f"{operation}, algorithms, µs", rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--nccl-tests", type=pathlib.Path, required=True)
    parser.add_argument("--phalanx", type=pathlib.Path, default="target/release/phalanx")
    parser.add_argument("--operations", default="all_reduce,all_gather,reduce_scatter,all_to_all,broadcast,send_recv,reduce,gather,scatter")
    parser.add_argument("--modes", default="graph,eager,algorithms,long")
    parser.add_argument("--ways", type=lambda text: [int(way) for way in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing after so many seconds")
    args = parser.parse_args()
    began = time.monotonic()
    # NVLink multicast can put a shared host's GPUs out of service.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    for mode in args.modes.split(","):
        for operation in args.operations.split(","):
            if time.monotonic() - began > args.seconds:
                print(f"not measured for lack of time: {operation}, {mode}")
            elif mode == "algorithms":
                algorithms(args, operation)
            else:
                compare(args, operation, mode)


if __name__ == "__main__":
    main()
