"""llama.cpp's library, with a loop that batches like its server. Imported in the peer's environment.

A request gets the free slot whose cache shares the longest prefix with its prompt, and computes the rest. A step has
the next token of every running request, then prompts. int8: Q8_0 weights, KV cache in f16, the library's default.
float32: weights and KV cache.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.harness.load import Feed, Load, PlannedRequest, Trace
from bench.peers.calls import Clock, Serving, main
from bench.systems.llama_gguf import CONFIG, MODEL, convert
from bench.systems.llama_library import F16, F32, Batch, load_library

CACHE_BYTES = 1 << 30
MOST_TOKENS = 65536
STEP_TOKENS, KERNEL_TOKENS = 2048, 512
"""The defaults of llama.cpp's server: -b and -ub."""


@dataclass(eq=False)
class Slot:
    number: int
    cached: list[int] = field(default_factory=list)
    """Tokens whose keys and values are in the slot."""
    todo: list[int] = field(default_factory=list)
    """Tokens to compute before the next one can be chosen."""
    max_tokens: int = 0
    """Length of the output."""
    trace: Trace = field(default_factory=lambda: Trace(0.0, [], [], []))

    @property
    def is_running(self) -> bool:
        return len(self.trace.tokens) < self.max_tokens

    def num_reused(self, prompt: Sequence[int]) -> int:
        """Tokens that need not be computed again. The last token of a prompt always is, for its logits."""
        return min(common_prefix(self.cached, prompt), len(prompt) - 1)

    def start(self, request: PlannedRequest, now: float) -> None:
        reused = self.num_reused(request.prompt)
        self.max_tokens, self.trace = request.max_tokens, Trace(now, [], [], [], reused)
        self.cached, self.todo = request.prompt[:reused], request.prompt[reused:]

    def append(self, token: int, now: float) -> None:
        self.trace.tokens.append(token)
        self.trace.arrivals.append(now)
        self.trace.counts.append(1)
        self.todo = [token]


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class Context:
    """The model, its KV cache of `width` sequences, and the arrays of one step."""

    def __init__(self, folder: Path, threads: int, width: int) -> None:
        self._numpy: Any = import_module("numpy")
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        self._vocab = config["vocab_size"]
        self._library = load_library()
        model = self._library.llama_model_load_from_file(
            str(folder / MODEL).encode(), self._library.llama_model_default_params()
        )
        self._context = self._library.llama_init_from_model(model, self._params(config, threads, width))
        if not self._context:
            raise RuntimeError(f"llama.cpp did not load {folder}")
        self._memory = self._library.llama_get_memory(self._context)
        self._batch = Batch()
        self._arrays = self._point_to_arrays(width)

    def forget(self, sequence: int, kept: int) -> None:
        """Removes all tokens of the sequence from position `kept` on."""
        if not self._library.llama_memory_seq_rm(self._memory, sequence, kept, -1):
            raise RuntimeError(f"llama.cpp could not remove the tokens of sequence {sequence} from position {kept} on")

    def step(self, rows: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """Computes rows of (token, position, sequence, whether to predict the next token). Returns the most likely next
        tokens of the rows that predict."""
        tokens, positions, sequences, predicts = zip(*rows, strict=True)
        arrays, count = self._arrays, len(rows)
        arrays["token"][:count], arrays["pos"][:count], arrays["logits"][:count] = tokens, positions, predicts
        arrays["seq_id"][:count] = arrays["sequences"].ctypes.data + 4 * self._numpy.array(sequences, "uint64")
        self._batch.n_tokens = count
        if failed := self._library.llama_decode(self._context, self._batch):
            raise RuntimeError(f"llama_decode of {count} tokens failed: {failed}")
        shape = sum(predicts), self._vocab
        if not shape[0]:
            return []
        logits = self._numpy.ctypeslib.as_array(self._library.llama_get_logits(self._context), shape)
        chosen: list[int] = logits.argmax(axis=1).tolist()
        return chosen

    def _params(self, config: dict[str, Any], threads: int, width: int) -> Any:
        params = self._library.llama_context_default_params()
        is_float32 = config["precision"] == "float32"
        values = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
        params.n_ctx = min(MOST_TOKENS, CACHE_BYTES // (values * (4 if is_float32 else 2)))
        params.n_batch, params.n_ubatch = STEP_TOKENS, KERNEL_TOKENS
        params.n_seq_max = params.n_outputs_max = width
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = F32 if is_float32 else F16
        params.kv_unified = False
        return params

    def _point_to_arrays(self, width: int) -> dict[str, Any]:
        kinds = {"token": "int32", "pos": "int32", "n_seq_id": "int32", "seq_id": "uint64", "logits": "int8"}
        arrays = {name: self._numpy.ones(STEP_TOKENS, kind) for name, kind in kinds.items()}
        for name, kind, *_ in Batch._fields_:
            if name in arrays:
                setattr(self._batch, name, arrays[name].ctypes.data_as(kind))
        return arrays | {"sequences": self._numpy.arange(width, dtype="int32")}


def start(folder: Path, threads: int, width: int) -> Serving:
    context, slots = Context(folder, threads, width), [Slot(number) for number in range(width)]
    return lambda load, clock: _serve(context, slots, load, clock)


def _serve(context: Context, slots: Sequence[Slot], load: Load, clock: Clock) -> list[Trace]:
    feed, traces, running = Feed(load), list[Trace](), list[Slot]()
    while True:
        for request in (load.requests[i] for i in feed.due()):
            slot = best_slot([slot for slot in slots if slot not in running], request.prompt)
            slot.start(request, clock())
            context.forget(slot.number, len(slot.cached))
            traces.append(slot.trace)
            running.append(slot)
        if not running:
            return traces
        _step(context, running, clock)
        feed.on_ended(sum(not slot.is_running for slot in running))
        running = [slot for slot in running if slot.is_running]


def best_slot(free: Sequence[Slot], prompt: Sequence[int]) -> Slot:
    return max(free, key=lambda slot: slot.num_reused(prompt))


def _step(context: Context, running: Sequence[Slot], clock: Clock) -> None:
    rows, ready = list[tuple[int, int, int, bool]](), list[Slot]()
    for slot in sorted(running, key=lambda slot: not slot.trace.tokens):
        part = slot.todo[: STEP_TOKENS - len(rows)]
        is_last = len(part) == len(slot.todo)
        at, end = len(slot.cached), len(part) - 1
        rows += [(token, at + i, slot.number, is_last and i == end) for i, token in enumerate(part)]
        slot.cached, slot.todo = slot.cached + part, slot.todo[len(part) :]
        if part and is_last:
            ready.append(slot)
    chosen = context.step(rows)
    now = clock()
    for slot, token in zip(ready, chosen, strict=True):
        slot.append(token, now)


if __name__ == "__main__":
    main(convert, start)
