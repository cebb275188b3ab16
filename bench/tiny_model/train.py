"""Train the checkpoint: python -m bench.tiny_model.train --out DIR --minutes N --seed N --threads N."""

import argparse
import itertools
import json
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from bench.tiny_model import corpus, tokenizer
from bench.tiny_model.muon import Muon

VOCAB_SIZE = 4096
MAX_LENGTH = 2048
# Tokens per row on the plateau. Shorter rows make cheaper steps; only the decay trains with rows of MAX_LENGTH.
WINDOW = 512
BATCH_TOKENS = 4096
LEARNING_RATE = 3e-3
WARMUP_STEPS = 100
DECAY_SHARE = 0.2
SAVE_EVERY_S = 600

Optimizers = tuple[torch.optim.Optimizer, ...]


@dataclass(frozen=True)
class Record:
    """The content of training.json."""

    seed: int
    python: str
    parameters: int
    corpus_tokens: int
    steps: int
    planned_steps: int | None
    tokens: int
    seconds: int
    train_loss: float
    held_out_loss: float


def build(ids: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """An untrained model of about 5 million parameters, float32."""
    stop_ids = ids.convert_tokens_to_ids([tokenizer.IM_END, tokenizer.END_OF_TEXT])
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=ids.eos_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.7, top_k=40, top_p=0.95, eos_token_id=stop_ids, pad_token_id=ids.eos_token_id
    )
    return model


def optimizers(model: Qwen3ForCausalLM) -> Optimizers:
    """Muon for the layers' matrices, AdamW for the embedding and the norms."""
    matrices = [weight for name, weight in model.named_parameters() if name.endswith("_proj.weight")]
    others = [weight for name, weight in model.named_parameters() if not name.endswith("_proj.weight")]
    adamw = torch.optim.AdamW(others, lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    return Muon(matrices, lr=LEARNING_RATE), adamw


def loss_of(model: Qwen3ForCausalLM, batch: Tensor) -> Tensor:
    """Mean next-token cross-entropy in nats over int64 [rows, length + 1]."""
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: Qwen3ForCausalLM, tokens: Tensor, max_batches: int | None = None) -> float:
    """Mean loss over the held-out stream in windows of the trained length."""
    rows = itertools.islice(corpus.in_order(tokens, WINDOW, BATCH_TOKENS // WINDOW), max_batches)
    losses = [loss_of(model, batch).item() for batch in rows]
    return sum(losses) / len(losses)


def train_step(model: Qwen3ForCausalLM, steppers: Optimizers, batch: Tensor, rate: float) -> float:
    """One update at `rate` times the peak learning rate; returns the loss before the update."""
    loss = loss_of(model, batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for stepper in steppers:
        for group in stepper.param_groups:
            group["lr"] = LEARNING_RATE * rate
        stepper.step()
        stepper.zero_grad(set_to_none=True)
    return loss.item()


class Schedule:
    """Learning rate (warm-up, plateau, linear decay) and duration: a number of steps, or by the clock."""

    def __init__(self, minutes: float, steps: int | None) -> None:
        self.total = steps
        self._plateau_ends = time.monotonic() + 60 * minutes * (1 - DECAY_SHARE)

    def observe(self, step: int) -> None:
        """Call after each step, with the number of steps so far."""
        if self.total is None and step > WARMUP_STEPS and time.monotonic() >= self._plateau_ends:
            # Fix the total now, so that a later run with `steps` set to it trains the same model.
            self.total = round(step / (1 - DECAY_SHARE))

    def decaying(self, step: int) -> bool:
        return self.total is not None and step >= self.total * (1 - DECAY_SHARE)

    def done(self, step: int) -> bool:
        return self.total is not None and step >= self.total

    def rate(self, step: int) -> float:
        """Fraction of the peak learning rate, in (0, 1]."""
        rate = min(1.0, (step + 1) / WARMUP_STEPS)
        if self.total is not None and self.decaying(step):
            rate = min(rate, (self.total - step) / (self.total * DECAY_SHARE))
        return rate


class TrainingRun:
    """Model, data and output folder."""

    def __init__(self, out: Path, seed: int, schedule: Schedule, progress: Progress) -> None:
        torch.manual_seed(seed)
        train, held_out = corpus.read(seed)
        self.out, self.seed, self.schedule, self.progress = out, seed, schedule, progress
        self.ids = tokenizer.train(train.files, VOCAB_SIZE, MAX_LENGTH)
        self.train_tokens = corpus.pack(train, self.ids, seed)
        self.held_out_tokens = corpus.pack(held_out, self.ids, seed)
        self.model = build(self.ids)
        self.started = time.monotonic()

    def train(self) -> None:
        """Train to the end of the schedule, saving every SAVE_EVERY_S seconds and at the end."""
        steppers, windows = optimizers(self.model), corpus.Windows(self.train_tokens, self.seed)
        task = self.progress.add_task("training", total=self.schedule.total, loss=0.0)
        loss, saved, step = 0.0, time.monotonic(), 0
        while not self.schedule.done(step):
            length = MAX_LENGTH if self.schedule.decaying(step) else WINDOW
            batch = windows.next(length, BATCH_TOKENS // length)
            step_loss = train_step(self.model, steppers, batch, self.schedule.rate(step))
            step += 1
            # A moving average over about 100 steps.
            loss = loss + (step_loss - loss) * max(0.01, 1 / step)
            self.schedule.observe(step)
            self.progress.update(task, completed=step, total=self.schedule.total, loss=loss)
            if time.monotonic() - saved > SAVE_EVERY_S:
                self.save(step, loss, max_batches=8)
                saved = time.monotonic()
        self.save(step, loss)

    def save(self, step: int, train_loss: float, max_batches: int | None = None) -> None:
        """Write the checkpoint as bfloat16, and training.json."""
        record = Record(
            seed=self.seed,
            python=platform.python_version(),
            parameters=self.model.num_parameters(),
            corpus_tokens=len(self.train_tokens),
            steps=step,
            planned_steps=self.schedule.total,
            tokens=step * BATCH_TOKENS,
            seconds=round(time.monotonic() - self.started),
            train_loss=round(train_loss, 4),
            held_out_loss=round(held_out_loss(self.model, self.held_out_tokens, max_batches), 4),
        )
        # Convert a copy: training continues in float32.
        half = Qwen3ForCausalLM(self.model.config).bfloat16()
        half.load_state_dict(self.model.state_dict())
        half.generation_config = self.model.generation_config
        half.save_pretrained(self.out)
        self.ids.save_pretrained(self.out)
        (self.out / "training.json").write_text(json.dumps(asdict(record), indent=2) + "\n")
        self.progress.console.print(record)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the tiny Qwen3 checkpoint on the standard library's source.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the checkpoint to")
    parser.add_argument("--minutes", type=float, default=75.0, help="wall time to spend")
    parser.add_argument("--steps", type=int, help="train this many steps instead, to repeat an earlier run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    columns = (TextColumn("loss {task.fields[loss]:.3f}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress:
        TrainingRun(args.out, args.seed, Schedule(args.minutes, args.steps), progress).train()


if __name__ == "__main__":
    main()
