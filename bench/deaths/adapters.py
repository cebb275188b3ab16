"""Streams with LoRA and prompt adapters, through a separate ring: its engines have int8 weights and a draft model,
those of the other streams have float32 weights and use prompt lookup."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from bench.deaths.requests import PROMPT_ROWS, TABLE, StreamRequest, in_turns
from bench.deaths.streams import StreamsPlan
from bench.harness.adapters import write_adapter
from sluice import Client
from sluice.client import read_lora
from sluice.launch import Ring
from sluice.tiny_model import path

BY_PATH, UPLOADED, PROMPT = "by-path", "uploaded", "prompt"
DEVIATION = 0.15
"""Standard deviation of the factors' values, large enough that an adapter changes most tokens."""
MIXED = (
    "LoRA adapters by path and uploaded with the request, alone and with guided decoding, beam search, prompt tables "
    "and prompt adapters, prompt adapters alone and with guided decoding, and streams without an adapter, all with "
    "draft tokens of a draft model"
)


def write_adapters(folder: Path) -> None:
    write_adapter(folder / BY_PATH, path(), 8, 1, DEVIATION)
    write_adapter(folder / UPLOADED, path(), 4, 2, DEVIATION)
    _write_prompt_adapter(folder / PROMPT)


def _write_prompt_adapter(folder: Path) -> None:
    """Writes a folder in the format of peft's prompt tuning."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"prompt_embeddings": PROMPT_ROWS}, folder / "adapter_model.safetensors")
    rows, hidden_size = PROMPT_ROWS.shape
    config = {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": rows, "token_dim": hidden_size}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


@contextmanager
def ring(plan: StreamsPlan, folder: Path, **options: Any) -> Iterator[Ring]:
    """A ring with the adapters of `write_adapters(folder)` that are loaded by path. `options` are options of the
    ring."""
    lora, prompt = str(folder / BY_PATH), str(folder / PROMPT)
    # Configured in the settings too: adapters loaded by a call are lost if all routers and engines die together.
    router = {
        "lora_in_requests": True,
        "lora_adapters": {BY_PATH: lora},
        "prompt_adapters": {PROMPT: prompt},
        "prompt_adapter_folders": [str(folder)],
    }
    # The model is its own draft model: its draft tokens are accepted where no adapter changes the token.
    engine = {"lora": True, "lora_folders": [str(folder)], "quantize": "int8", "draft_model": str(path())}
    with plan.ring(engine, router, **options) as found:
        with Client(found.addresses) as client:
            # The routers load them too, but some time after their start.
            client.load_lora(BY_PATH, path=lora)
            client.load_prompt_adapter(PROMPT, path=prompt)
        yield found


def requests(plan: StreamsPlan, folder: Path) -> list[StreamRequest]:
    return in_turns(_kinds(folder), plan.streams, plan.max_tokens)


def _kinds(folder: Path) -> Mapping[str, Mapping[str, Any]]:
    by_path = {"lora_id": BY_PATH}
    # Sent with the request: an uploaded adapter is lost once all its routers and engines have died.
    uploaded = {"lora_weights": read_lora(folder / UPLOADED)}
    guide = {"regex": r"(\[[a-z]{3}, [0-9]{2}\] ){12,30}end"}
    prompt = {"prompt_adapter_id": PROMPT}
    return {
        "adapter": {"temperature": 0.0, "logprobs": 1, **by_path},
        "uploaded adapter": {"temperature": 0.8, "n": 2, "logprobs": 1, **uploaded},
        "without adapters": {"temperature": 0.9},
        "adapter, guided": {"temperature": 0.8, "guided": guide, **uploaded},
        "adapter, drafts": {"temperature": 0.3, "speculation": {"max_draft_tokens": 6}, **by_path},
        "adapter, beams": {"n": 2, "beam_search": {"width": 4}, **by_path},
        "adapter, prompt table": {"temperature": 0.7, "prompt_table": TABLE, **uploaded},
        "prompt adapter": {"temperature": 0.8, "n": 2, "logprobs": 1, **prompt},
        "prompt adapter, guided": {"temperature": 0.8, "guided": guide, **prompt},
        "both adapters": {"temperature": 0.0, **by_path, **prompt},
    }
