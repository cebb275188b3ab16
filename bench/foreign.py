"""python -m bench.foreign LLAMA_SERVER compares llama.cpp's server with a ring and its gateway, by `sluice bench`.

For each model and precision the three serve the same checkpoint on the same cores, in turns.
"""

import argparse
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from bench.harness.children import ROOT
from bench.peers.catalog import LLAMA
from bench.peers.checkpoints import SHAPES, TINY_NAME, checkpoint
from sluice.host.cores import usable_cores
from sluice.launch import Ring

MODELS = (TINY_NAME, *SHAPES)
QUANTIZE = {"float32": None, "int8": "int8"}
CONTEXT_TOKENS = 512
"""Context length of each slot of llama.cpp, which divides its KV cache evenly among the slots."""
START_SECONDS = 120.0
END_SECONDS = 20.0


def main(arguments: list[str]) -> None:
    options = _options(arguments)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for model in options.models:
            for precision in options.precisions:
                compare(options, model, precision, Path(folder))


def compare(options: argparse.Namespace, model: str, precision: str, folder: Path) -> None:
    """Raises RingError or RuntimeError if a server does not start, CalledProcessError if the measurement fails."""
    print(f"\n{model}, {precision}", flush=True)
    source = checkpoint(model)
    with ExitStack() as servers:
        http, other = _free_port(), _free_port()
        engine = {"quantize": QUANTIZE[precision], "threads": options.threads}
        ring = Ring(source, name=model, port=_free_port(), http_port=http, engine_args=engine)
        servers.enter_context(ring)
        file = _gguf(options.gguf_python, source, folder / "model.gguf", precision)
        command = [str(options.llama_server), "-m", str(file), "-a", model, "--port", str(other)]
        command += ["-t", str(options.threads), "-np", str(options.concurrency)]
        command += ["-c", str(CONTEXT_TOKENS * options.concurrency)]
        servers.enter_context(foreign_server(command, other, folder / "llama.log"))
        bench = [f"ring={ring.address}", f"gateway=http://127.0.0.1:{http}", f"llama.cpp=http://127.0.0.1:{other}"]
        bench += ["--requests", str(options.requests), "--rounds", str(options.rounds)]
        bench += ["--concurrency", str(options.concurrency)]
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            bench += ["--json", str(options.out / f"{model}-{precision}.json")]
        subprocess.run([sys.executable, "-m", "sluice", "bench", *bench], check=True)


@contextmanager
def foreign_server(command: Sequence[str], port: int, log: Path) -> Iterator[None]:
    """Runs a server. Raises RuntimeError if the server exits or is not healthy within START_SECONDS."""
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream)
    try:
        end = time.monotonic() + START_SECONDS
        while not _is_healthy(port):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{command[0]} did not start:\n{log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_healthy(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def _gguf(python: Path, source: Path, file: Path, precision: str) -> Path:
    command: list[Path | str] = [python, "-m", "bench.systems.llama_gguf", source, file, precision]
    subprocess.run(command, cwd=ROOT, check=True)
    return file


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.foreign", description=__doc__)
    parser.add_argument("llama_server", type=Path, metavar="LLAMA_SERVER", help="executable of the server")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["tiny", "25M"], metavar="MODEL")
    parser.add_argument("--precisions", nargs="+", choices=QUANTIZE, default=list(QUANTIZE), metavar="PRECISION")
    parser.add_argument("--requests", type=int, default=64, help="requests to each server per round")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each server")
    parser.add_argument(
        "--threads", type=int, default=usable_cores(), help="threads of each server; default: all cores"
    )
    python = "interpreter with the package gguf; default: that of the peer llama.cpp"
    parser.add_argument("--gguf-python", type=Path, default=LLAMA.python, help=python)
    parser.add_argument("--out", type=Path, help="folder for the results as JSON")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
