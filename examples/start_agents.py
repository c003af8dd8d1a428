"""Start workers for prefill and for decode, wait on a queue until all are up, then serve.

    python examples/start_agents.py demo/demo.psm --prefill-workers 1 --decode-workers 1

``--prompt TEXT`` sends one request, prints the answer and ends, instead of serving until Ctrl-C.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from queue import Queue

from penstock import Client, ServiceError


def start_agents(model: str, port: int, num_prefill: int, num_decode: int) -> subprocess.Popen[bytes]:
    """Start a service with these workers, which older documents call agents."""
    roles = ["--prefill-workers", str(num_prefill), "--decode-workers", str(num_decode)]
    return subprocess.Popen([sys.executable, "-m", "penstock", "serve", model, "--port", str(port), *roles])


def announce(service: subprocess.Popen[bytes], client: Client, startup_queue: Queue[str]) -> None:
    """Put each worker into the queue once it is up; "" if the service ends."""
    told: set[str] = set()
    while service.poll() is None:
        try:
            workers = [worker for model in client.status()["models"] for worker in model["workers"]]
        except ServiceError:  # it does not listen yet
            workers = []
        for worker in workers:
            if worker["status"] == "ready" and worker["name"] not in told:
                told.add(worker["name"])
                startup_queue.put(f"{worker['name']}, {worker['role']}")
        time.sleep(0.1)
    startup_queue.put("")


def main() -> int:
    """Start the agents and serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill-workers", type=int, default=1)
    parser.add_argument("--decode-workers", type=int, default=1)
    parser.add_argument("--prompt")
    args = parser.parse_args()
    service = start_agents(args.model, args.port, args.prefill_workers, args.decode_workers)
    client = Client(f"http://127.0.0.1:{args.port}", retries=0)
    startup_queue: Queue[str] = Queue()
    threading.Thread(target=announce, args=(service, client, startup_queue), daemon=True).start()
    try:
        for _ in range(args.prefill_workers + args.decode_workers):
            started = startup_queue.get()
            if not started:
                return service.wait()
            print(f"agent {started}: started", flush=True)
        print("all agents started", flush=True)
        if args.prompt is not None:
            print(client.complete(args.prompt, max_tokens=16, temperature=0)["choices"][0]["text"])
            return 0
        return service.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        service.terminate()
        service.wait()


if __name__ == "__main__":
    sys.exit(main())
