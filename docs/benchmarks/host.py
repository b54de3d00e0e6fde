"""Tables of phalanx's host backend and its peers, all programs in turns: the best of several rounds for everybody, in microseconds.

A peer is a name and a command that prints mpibench.c's lines; {ranks}, {op}, {max} and {min} are filled in.

A virtual machine's cores may share a cache now and not a minute later. With --boundary an all_reduce of 4 bytes is timed before and after
each program: what took less than so many microseconds before and after, and what took more, go into tables of their own, which show
medians; what took less before and more after, or the reverse, is left out.

    python3 docs/benchmarks/host.py --ranks 2 --rounds 5 --max 16777216 \\
        --peer 'Intel MPI=DIRTY=1 PIN=1 mpiexec.hydra -n {ranks} ./mpibench intel 1 {op} {max} {min}'
"""

import argparse
import collections
import csv
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
}
# In which each rank has a block for each; the others have one.
OF_BLOCKS = ["all_gather", "reduce_scatter", "all_to_all"]
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
    """The smallest and the largest, in bytes; mpibench wants some for a barrier, too."""
    if operation == "barrier":
        return 4, 4
    return max(args.min, 8 * args.ranks if operation in OF_BLOCKS else 4), args.max


def peer_times(command, operation, args):
    theirs = OPERATIONS[operation]
    smallest, largest = sizes(operation, args)
    lines = output(command.format(ranks=args.ranks, op=theirs, max=largest, min=smallest)).splitlines()
    rows = [line.split(",") for line in lines if line.count(",") >= 5]
    return {int(row[4]): float(row[5]) for row in rows if row[2] == theirs}


def own_times(mode, operation, args):
    smallest, largest = sizes(operation, args)
    return perf(mode, operation, smallest, largest, args)


def perf(mode, operation, smallest, largest, args):
    with tempfile.NamedTemporaryFile("r", suffix=".csv") as file:
        ranks = MODES[mode][1].format(ranks=args.ranks)
        output(f"{args.phalanx} perf {operation} {ranks} --pin -b {smallest} -e {largest} -f 4 -c 0 --csv {file.name}")
        rows = list(csv.DictReader(file))
    # MPI_Bcast has one buffer.
    place = "in-place" if operation == "broadcast" else "out-of-place"
    return {int(row["size"]): float(row["time_us"]) for row in rows if operation == "barrier" or row["place"] == place}


def shown(time):
    return "" if time is None else f"{time:.2f}" if time < 100 else f"{time:,.0f}"


def state(args):
    """Whether the cores are close to each other now."""
    return args.boundary is None or perf("processes", "all_reduce", 4, 4, args)[4] < args.boundary


def table(heading, peers, modes, times):
    header = ["bytes", *peers]
    for mode in modes:
        header += [MODES[mode][0], "ratio"]
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for size in sorted({size for of_program in times.values() for size in of_program}):
        theirs = [times[peer].get(size) for peer in peers]
        fastest = min((time for time in theirs if time is not None), default=None)
        row = [f"{size:,}", *map(shown, theirs)]
        for mode in modes:
            time = times[mode].get(size)
            row += [shown(time), f"{time / fastest:.2f}" if time and fastest else ""]
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
    shown_of = min if args.boundary is None else statistics.median

    for operation in args.operations.split(","):
        # By whether the cores were close, by program, and by size.
        times = {close: collections.defaultdict(lambda: collections.defaultdict(list)) for close in (True, False)}
        before = state(args)
        for _ in range(args.rounds):
            for program in [*peers, *modes]:
                if program in peers:
                    measured = peer_times(peers[program], operation, args)
                else:
                    measured = own_times(program, operation, args)
                after = state(args)
                if before == after:
                    for size, time in measured.items():
                        times[after][program][size].append(time)
                before = after
        for close, of_state in times.items():
            if of_state:
                numbers = {p: {size: shown_of(all) for size, all in of_state[p].items()} for p in [*peers, *modes]}
                which = "" if args.boundary is None else ", cores that share a cache" if close else ", cores that share none"
                print(table(operation + which, peers, modes, numbers), flush=True)


main()
