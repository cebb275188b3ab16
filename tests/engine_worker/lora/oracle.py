"""Random adapters that peft saves, and peft's results with them."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from sluice.checkpoint.peft import CONFIG, WEIGHTS
from sluice.wire.adapters import Adapter, AdapterFiles

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
SIZE = 0.2


def write_adapter(folder: Path, model: Path, seed: int = 0, targets=ATTENTION + MLP, rank: int = 8, **options) -> Path:
    """Write an adapter with random a and b; a new adapter of peft has b = 0, which changes nothing."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(seed)
    config = LoraConfig(
        r=rank, target_modules=list(targets), lora_alpha=options.pop("lora_alpha", 16), task_type="CAUSAL_LM", **options
    )
    wrapped = get_peft_model(base, config)
    with torch.no_grad():
        for name, weight in wrapped.named_parameters():
            if "lora_" in name:
                weight.copy_(torch.randn_like(weight) * SIZE)
    wrapped.save_pretrained(folder)
    return folder


def files_of(folder: Path) -> AdapterFiles:
    return AdapterFiles((folder / CONFIG).read_bytes(), (folder / WEIGHTS).read_bytes())


def adapter_of(folder: Path, name: str = "tuned", *, by_path: bool = True) -> Adapter:
    return Adapter(name, files_of(folder).version, str(folder) if by_path else "")


def changed_config(files: AdapterFiles, **options) -> AdapterFiles:
    return AdapterFiles(json.dumps(json.loads(files.config) | options).encode(), files.weights)


class Oracle:
    """peft's forward pass, with one model and every adapter that was used so far."""

    def __init__(self, model: Path) -> None:
        self._base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._tuned: PeftModel | None = None

    # Not in inference mode: peft changes flags of all adapters' weights when it adds one, which such tensors forbid.
    @torch.inference_mode(False)
    def _model(self, folder: Path) -> PeftModel:
        name = re.sub(r"\W", "_", str(folder))
        if self._tuned is None:
            self._tuned = PeftModel.from_pretrained(self._base, folder, adapter_name=name).eval()
        elif name not in self._tuned.peft_config:
            self._tuned.load_adapter(folder, adapter_name=name)
        self._tuned.set_adapter(name)
        return self._tuned

    @contextmanager
    def using(self, folder: Path | None) -> Iterator[torch.nn.Module]:
        """The model with this adapter, or without any."""
        if folder is not None:
            yield self._model(folder)
        else:
            with nullcontext() if self._tuned is None else self._tuned.disable_adapter():
                yield self._base

    @torch.inference_mode()
    def logits(self, folder: Path | None, tokens) -> torch.Tensor:
        """[T, vocab] float32."""
        with self.using(folder) as model:
            return model(torch.tensor([tokens])).logits[0].float()

    def greedy(self, folder: Path | None, prompt, count: int) -> tuple[list[int], list[float]]:
        """Generate greedily; returns the tokens and their log-probabilities."""
        tokens, scores = list(prompt), []
        for _ in range(count):
            row = self.logits(folder, tokens)[-1].log_softmax(0)
            tokens.append(int(row.argmax()))
            scores.append(float(row.max()))
        return tokens[len(prompt) :], scores
