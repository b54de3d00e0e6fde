"""Tables of UCX's backend beside MPICH, Open MPI and Gloo, on two hosts that .ci/hosts makes; all programs in turns, medians of the rounds in µs.

The MPIs are measured by `phalanx perf`, too, through phalanx's backend for them; Gloo, if `.ci/run` has unpacked Debian's PyTorch, by
torch_gloo.py. The hosts share this machine's cores: each counts half of them. As root:

    cargo build --release --workspace --bin phalanx
    python3 docs/benchmarks/hosts.py --rounds 3
"""

import argparse
import collections
import csv
import os
import pathlib
import statistics
import subprocess
import tempfile

STATE = pathlib.Path("/run/hosts-benchmark")
TOKEN = STATE / "token"
PORT = 29400


def hosts(*words, **settings):
    cores = str(max(1, os.cpu_count() // 2))
    environment = os.environ | {"HOSTS_DIR": str(STATE), "PHALANX_CORES": cores} | settings
    return subprocess.run([".ci/hosts", *words], env=environment, capture_output=True, text=True, timeout=600)


def ucx(program, per_host):
    launch = f"{program[0]} launch --nnodes 2 --node-rank $HOST --store h0:{PORT} --token-file {TOKEN} --no-prefix -n {per_host} --"
    return hosts("all", "sh", "-c", f"exec {launch} {' '.join(program)}", PHALANX_BACKEND="ucx")


def mpich(program, per_host):
    return hosts("login", "mpirun.mpich", "-hosts", "h0,h1", "-ppn", str(per_host), "-n", str(2 * per_host), *program)


def open_mpi(program, per_host):
    slots = f"h0:{per_host},h1:{per_host}"
    words = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1"]
    return hosts("login", *words, "-H", slots, "-n", str(2 * per_host), *program)


PROGRAMS = {"MPICH": mpich, "Open MPI": open_mpi, "UCX": ucx}


def gloo(operation, per_host, args):
    """By size, in µs."""
    theirs = {"all_reduce": "allreduce", "broadcast": "bcast", "all_gather": "allgather", "all_to_all": "alltoall"}[operation]
    nodes = f"--nnodes 2 --node-rank $HOST --master-addr 10.77.0.1 --master-port 29500 --nproc-per-node {per_host}"
    # By their whole paths: the loader does not find its way from a folder of another namespace.
    torchrun, torch = map(os.path.abspath, (".ci/torchrun", ".ci/torch"))
    program = f"docs/benchmarks/torch_gloo.py {theirs} {args.max} {args.min} {args.factor}"
    words = f"exec {torchrun} {nodes} --no-python {torch} {program}"
    done = hosts("all", "sh", "-c", words, GLOO_SOCKET_IFNAME="eth0", OMP_NUM_THREADS="1")
    rows = [line.split(",") for line in done.stdout.splitlines() if line.startswith("gloo,")]
    if not rows:
        print(f"gloo: {done.stdout}{done.stderr}")
    return {int(row[4]): float(row[5]) for row in rows}


def times(start, operation, per_host, args):
    """By size, in µs; nothing if the program fails."""
    with tempfile.NamedTemporaryFile("r", suffix=".csv", dir=STATE) as file:
        sizes = ["-b", str(args.min), "-e", str(args.max), "-f", str(args.factor)]
        done = start([args.phalanx, "perf", operation, *sizes, "-c", "0", "--csv", file.name], per_host)
        rows = list(csv.DictReader(file))
        if done.returncode != 0 and not rows:
            print(f"{start.__name__}: {done.stdout}{done.stderr}")
    place = "in-place" if operation == "broadcast" else "out-of-place"
    return {int(row["size"]): float(row["time_us"]) for row in rows if row["place"] == place}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phalanx", default=os.path.abspath("target/release/phalanx"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--min", type=int, default=16)
    parser.add_argument("--max", type=int, default=64 << 20)
    parser.add_argument("--factor", type=int, default=16)
    parser.add_argument("--per-host", default="1,2")
    parser.add_argument("--operations", default="all_reduce,all_gather,broadcast,all_to_all")
    args = parser.parse_args()
    has_gloo = pathlib.Path("target/ci-debian13/unpacked").exists()
    columns = [*PROGRAMS, *(["Gloo"] if has_gloo else [])]
    made = hosts("up", "2")
    assert made.returncode == 0, made.stderr
    try:
        TOKEN.write_text(os.urandom(16).hex())
        TOKEN.chmod(0o600)
        for operation in args.operations.split(","):
            for per_host in map(int, args.per_host.split(",")):
                found = collections.defaultdict(lambda: collections.defaultdict(list))
                for _ in range(args.rounds):
                    for name, start in PROGRAMS.items():
                        for size, time in times(start, operation, per_host, args).items():
                            found[size][name].append(time)
                    if "Gloo" in columns:
                        for size, time in gloo(operation, per_host, args).items():
                            found[size]["Gloo"].append(time)
                print(f"\n{operation}, 2 hosts × {per_host}\n\n| bytes | {' | '.join(columns)} | ratio |")
                print("|---:" * (len(columns) + 2) + "|")
                for size, of_size in sorted(found.items()):
                    medians = {name: statistics.median(some) for name, some in of_size.items()}
                    best = min((time for name, time in medians.items() if name != "UCX"), default=None)
                    ratio = f"{medians['UCX'] / best:.2f}" if best and "UCX" in medians else ""
                    shown = (f"{medians[name]:,.1f}" if name in medians else "" for name in columns)
                    print(f"| {size:,} | {' | '.join(shown)} | {ratio} |", flush=True)
    finally:
        hosts("down")


main()
