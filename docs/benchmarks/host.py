"""Tables of phalanx's host backend and its peers, size by size, all programs in turns: medians of the rounds, in microseconds.

A peer is a name and a command that prints mpibench.c's lines; {ranks}, {op}, {max} and {min} are filled in, the last two with one size.

A virtual machine's cores may share a cache now and not a minute later. With --boundary an all_reduce of 4 bytes is timed before and after
each program: what took less than so many microseconds before and after, and what took more, go into tables of their own; what took less
before and more after, or the reverse, is left out. The last column has the fewest and the most times of a row's
programs. An interrupt ends an operation's rounds early; its table shows what there is.

    python3 docs/benchmarks/host.py --ranks 2 --rounds 5 --max 16777216 \\
        --peer 'Intel MPI=DIRTY=1 PIN=1 mpiexec.hydra -n {ranks} ./mpibench intel 1 {op} {max} {min}'
"""

import argparse
import collections
import contextlib
import csv
import itertools
import statistics
import subprocess
import sys
import tempfile

# Names here and in mpibench.c.
OPERATIONS = {
    "all_reduce": "allreduce",
    "all_gather": "allgather",
    "reduce_scatter": "reduce_scatter",
    "broadcast": "bcast",
    "all_to_all": "alltoall",
    "ping_pong": "pingpong",
    "barrier": "barrier",
    "scan": "scan",
    "exclusive_scan": "exscan",
    "recv_any": "recv_any",
    "neighbor_all_to_all": "neighbor_alltoall",
}
# In which each rank has a block for each, or for each neighbour; the others have one.
OF_BLOCKS = ["all_gather", "reduce_scatter", "all_to_all", "neighbor_all_to_all"]
# The heading of each, and how phalanx perf is told.
MODES = {
    "processes": ("processes", "-p {ranks}"),
    "alloc": ("processes, `Comm::alloc`", "-p {ranks} -R 1"),
    "threads": ("threads", "-t {ranks}"),
}


def output(command):
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=600)
    if done.returncode != 0 or "WRONG" in done.stderr:
        print(f"{command}: exit status {done.returncode}\n{done.stderr}", file=sys.stderr)
    return done.stdout


def sizes(operation, args):
    """In bytes, each four times the one before; mpibench wants some for a barrier, too."""
    if operation == "barrier":
        return [4]
    smallest = max(args.min, 8 * args.ranks if operation in OF_BLOCKS else 4)
    return list(itertools.takewhile(lambda size: size <= args.max, (smallest * 4**step for step in itertools.count())))


def peer_time(command, operation, size, args):
    theirs = OPERATIONS[operation]
    lines = output(command.format(ranks=args.ranks, op=theirs, max=size, min=size)).splitlines()
    rows = [line.split(",") for line in lines if line.count(",") >= 5]
    return next((float(row[5]) for row in rows if row[2] == theirs), None)


def own_time(mode, operation, size, args):
    with tempfile.NamedTemporaryFile("r", suffix=".csv") as file:
        ranks = MODES[mode][1].format(ranks=args.ranks)
        # Where every rank could have a GPU of its own, NCCL would be measured.
        output(f"PHALANX_BACKEND=host {args.phalanx} perf {operation} {ranks} --pin -b {size} -e {size} -c 0 --csv {file.name}")
        rows = list(csv.DictReader(file))
    # MPI_Bcast has one buffer.
    place = "in-place" if operation == "broadcast" else "out-of-place"
    return next((float(row["time_us"]) for row in rows if operation == "barrier" or row["place"] == place), None)


def shown(time):
    return "" if time is None else f"{time:.2f}" if time < 100 else f"{time:,.0f}"


def are_close(args):
    """Whether the cores are close to each other now."""
    return args.boundary is None or own_time("processes", "all_reduce", 4, args) < args.boundary


def measured(operation, peers, modes, args):
    """Times by whether the cores were close, by program, and by size. An interrupt ends it early."""
    times = {close: collections.defaultdict(lambda: collections.defaultdict(list)) for close in (True, False)}
    with contextlib.suppress(KeyboardInterrupt):
        before = are_close(args)
        for _, size, program in itertools.product(range(args.rounds), sizes(operation, args), [*peers, *modes]):
            if program in peers:
                time = peer_time(peers[program], operation, size, args)
            else:
                time = own_time(program, operation, size, args)
            after = are_close(args)
            if before == after and time is not None:
                times[after][program][0 if operation == "barrier" else size].append(time)
            before = after
    return times


def table(heading, peers, modes, times):
    header = ["bytes", *peers]
    for mode in modes:
        header += [MODES[mode][0], "ratio"]
    header.append("measured")
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for size in sorted({size for of_program in times.values() for size in of_program}):
        times_of = {program: times[program][size] for program in [*peers, *modes]}
        median_of = {program: statistics.median(some) if some else None for program, some in times_of.items()}
        fastest = min((median_of[peer] for peer in peers if median_of[peer] is not None), default=None)
        row = [f"{size:,}", *(shown(median_of[peer]) for peer in peers)]
        for mode in modes:
            time = median_of[mode]
            row += [shown(time), f"{time / fastest:.2f}" if time and fastest else ""]
        counts = [len(some) for some in times_of.values()]
        fewest, most = min(counts), max(counts)
        row.append(f"{fewest}" if fewest == most else f"{fewest} to {most}")
        lines.append("| " + " | ".join(row) + " |")
    return f"\n### {heading}\n\n" + "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phalanx", default="target/release/phalanx")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--min", type=int, default=4)
    parser.add_argument("--max", type=int, default=16 << 20)
    parser.add_argument("--boundary", type=float, metavar="MICROSECONDS")
    parser.add_argument("--operations", default=",".join(OPERATIONS))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND")
    args = parser.parse_args()
    peers = dict(peer.split("=", 1) for peer in args.peer)
    modes = args.modes.split(",")

    for operation in args.operations.split(","):
        for close, of_state in measured(operation, peers, modes, args).items():
            if of_state:
                which = "" if args.boundary is None else ", cores that share a cache" if close else ", cores that share none"
                print(table(operation + which, peers, modes, of_state), flush=True)


main()
