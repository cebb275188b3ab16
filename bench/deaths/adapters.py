"""Streams with LoRA adapters, through a ring of their own: on a CPU its engines compute by torch, the others' by
OpenVINO. They have a draft model, the others look drafts up."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.deaths.requests import TABLE, StreamRequest, in_turns
from bench.deaths.streams import StreamsPlan
from bench.harness.adapters import write_adapter
from sluice import Client
from sluice.client import read_lora
from sluice.launch import Ring
from sluice.tiny_model import path

BY_PATH, UPLOADED = "by-path", "uploaded"
DEVIATION = 0.15
"""Of the factors' values: so that an adapter changes most tokens."""
MIXED = (
    "LoRA adapters by path and uploaded with the request, alone and with guided decoding, beam search and prompt "
    "tables, and streams without adapter beside them, all with the guesses of a draft model"
)


def write_adapters(folder: Path) -> None:
    write_adapter(folder / BY_PATH, path(), 8, 1, DEVIATION)
    write_adapter(folder / UPLOADED, path(), 4, 2, DEVIATION)


@contextmanager
def ring(plan: StreamsPlan, folder: Path, **options: Any) -> Iterator[Ring]:
    """With the adapter that is loaded by path. `folder`: see `write_adapters`. `options`: of the ring."""
    where = str(folder / BY_PATH)
    router = {"lora_in_requests": True, "lora_adapters": {BY_PATH: where}}
    # The model is its own draft model: its guesses are right where no adapter changes the token.
    engine = {"lora": True, "lora_folders": [str(folder)], "draft_model": str(path())}
    with plan.ring(engine, router, **options) as found:
        with Client(found.addresses) as client:
            # The routers do so by themselves, but a while after their start.
            client.load_lora(BY_PATH, path=where)
        yield found


def requests(plan: StreamsPlan, folder: Path) -> list[StreamRequest]:
    return in_turns(_kinds(folder), plan.streams, plan.max_tokens)


def _kinds(folder: Path) -> Mapping[str, Mapping[str, Any]]:
    by_path = {"lora_id": BY_PATH}
    # With the request: a registered upload is gone once its routers and engines have all died.
    uploaded = {"lora_weights": read_lora(folder / UPLOADED)}
    guide = {"regex": r"(\[[a-z]{3}, [0-9]{2}\] ){12,30}end"}
    return {
        "adapter": {"temperature": 0.0, "logprobs": 1, **by_path},
        "uploaded adapter": {"temperature": 0.8, "n": 2, "logprobs": 1, **uploaded},
        "beside adapters": {"temperature": 0.9},
        "adapter, guided": {"temperature": 0.8, "guided": guide, **uploaded},
        "adapter, drafts": {"temperature": 0.3, "speculation": {"max_draft_tokens": 6}, **by_path},
        "adapter, beams": {"n": 2, "beam_search": {"width": 4}, **by_path},
        "adapter, prompt table": {"temperature": 0.7, "prompt_table": TABLE, **uploaded},
    }
