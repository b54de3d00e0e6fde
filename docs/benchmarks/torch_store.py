"""Stand-ins for ranks that meet at torch's TCPStore, beside those of phalanx. `phalanx-testkit start` starts it:

    cargo run --release -p phalanx-testkit --bin phalanx-testkit -- start --torch-store "python3 docs/benchmarks/torch_store.py"

Each rank has a connection. It sets its value and gets those of all, as torch's process groups exchange addresses. The ranks of a process take
turns: threads of Python would wait for each other.
"""

import argparse
import datetime
import sys

from torch.distributed import TCPStore

PATIENCE = datetime.timedelta(seconds=300)


def connected(host, port, is_server):
    options = {"timeout": PATIENCE, "wait_for_workers": False}
    try:
        return TCPStore(host, port, None, is_server, **options)
    except RuntimeError:
        # Debian builds PyTorch without libuv, its default.
        return TCPStore(host, port, None, is_server, use_libuv=False, **options)


def go_on():
    """Waits for the next step."""
    print("ready", flush=True)
    if not sys.stdin.readline():
        sys.exit()


def serve():
    store = connected("127.0.0.1", 0, True)
    print(f"127.0.0.1:{store.port}", flush=True)
    sys.stdin.readline()


def meet(args):
    host, port = args.address.split(":")
    own = range(args.first, args.first + args.count)
    go_on()
    stores = [connected(host, int(port), False) for _ in own]
    go_on()
    for rank, store in zip(own, stores):
        store.set(str(rank), rank.to_bytes(8, "little") * (args.bytes // 8))
    keys = [str(rank) for rank in range(args.ranks)]
    for store in stores:
        values = store.multi_get(keys)
        assert all(value[:8] == rank.to_bytes(8, "little") for rank, value in enumerate(values))
    go_on()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["store", "ranks"])
    parser.add_argument("--address")
    for name in ["first", "count", "ranks", "per-host", "bytes"]:
        parser.add_argument(f"--{name}", type=int)
    args = parser.parse_args()
    # phalanx's token: TCPStore has none.
    sys.stdin.readline()
    serve() if args.part == "store" else meet(args)


main()
