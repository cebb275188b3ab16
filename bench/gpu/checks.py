"""Checks that compare two runners, step by step or through the engine's loop, compare one with transformers, and find
slow fallbacks.

Random weights make near-ties common, and rounding decides near-ties. So logprobs are compared, and tokens only if the
most likely one leads clearly.
"""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.gpu.engine import SEED, Core, Served, random_prompts
from bench.gpu.findings import Outcome
from engine_worker.attention.reference import ReferenceAttention
from engine_worker.layers.shard import Place
from engine_worker.models.qwen3 import Qwen3
from engine_worker.protocol import Runner
from engine_worker.runner.weights import random_weights
from engine_worker.step import Draw, Drawn, Slice, Step
from sluice.wire.params import SamplingParams

TOLERANCES = {"float32": 2e-3, "bfloat16": 0.1, "float16": 0.02}
"""Tolerated difference of logprobs that are computed in two ways, by dtype: bfloat16 keeps 8 bits, so a logit between 2
and 4 has a resolution of 1/64. Unrelated logits of a random model differ by about 1, and have no likely tokens in
common."""
COMMON = 0.5
"""Fraction of the alternatives that two samples must have in common to be comparable."""
ALTERNATIVES = 20
"""Logprobs requested per token."""
GREEDY = SamplingParams(temperature=0.0, logprobs=ALTERNATIVES)
CHUNK = 256
PARITY_CHUNK = 100
PARITY_SLACK = 3.0
"""Allowed deviation from transformers in float32, as a multiple of the deviation of transformers in the model's dtype,
which is due to rounding only."""
FALLBACKS = {"attention": "reference", "fused": "no:", "cuda_graphs": "none:"}
"""Prefix of each choice's text that marks a slow fallback."""


class Choice(NamedTuple):
    lead: float
    """Log-probability by which the most likely token leads."""
    agreed: bool


def verdict(pairs: Iterable[tuple[Drawn, Drawn]], tolerance: float) -> Outcome:
    choices, most = [], 0.0
    for ours, theirs in pairs:
        most = max(most, difference(alternatives(ours), alternatives(theirs)))
        choices.append(Choice(_lead(theirs), ours.token == theirs.token))
    return judge(choices, most, tolerance)


def judge(choices: Sequence[Choice], most: float, tolerance: float, about: str = "") -> Outcome:
    """Holds if logprobs differ by at most the tolerance, and tokens agree if one leads by more than twice that."""
    clear = [choice.agreed for choice in choices if choice.lead > 2 * tolerance]
    detail = (
        f"{len(choices)} tokens: logprobs differ by {most:.2g} at most ({about}allowed {tolerance:.2g}); "
        f"{sum(clear)} of {len(clear)} clear choices agree"
    )
    return Outcome(bool(choices) and most <= tolerance < inf and all(clear), detail)


def difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> float:
    """The largest difference over the tokens in both; infinite if they have few tokens in common."""
    both = ours.keys() & theirs.keys()
    if len(both) < COMMON * min(len(ours), len(theirs)):
        return inf
    return max((abs(ours[token] - theirs[token]) for token in both), default=inf)


def alternatives(drawn: Drawn) -> dict[int, float]:
    """Logprobs of the most likely tokens; empty if sampling failed."""
    return {} if drawn.logprob is None else dict(drawn.logprob.top)


def _lead(drawn: Drawn) -> float:
    top = sorted(alternatives(drawn).values(), reverse=True)
    return top[0] - top[1] if len(top) > 1 else 0.0


def together(ours: Sequence[Drawn], theirs: Sequence[Drawn]) -> Iterator[tuple[Drawn, Drawn]]:
    """Pairs of sampled tokens of two continuations, up to and including the first pair that differs."""
    for pair in zip(ours, theirs, strict=True):
        yield pair
        if pair[0].token != pair[1].token:
            return


class Walk:
    """Runs sequences through a runner step by step, without a scheduler, with blocks scattered over the pool."""

    def __init__(self, runner: Runner, prompts: Sequence[Sequence[int]], room: int, seed: int = 0) -> None:
        """`room`: tokens after each prompt. Raises ValueError if the pool is too small."""
        self._runner = runner
        self.tokens = [list(prompt) for prompt in prompts]
        self._prompts = [len(prompt) for prompt in prompts]
        self._computed = [0] * len(prompts)
        counts = [-(-(len(prompt) + room) // runner.tokens_per_block) for prompt in prompts]
        blocks = list(range(sum(counts)))
        if len(blocks) > runner.num_blocks:
            raise ValueError(f"{len(blocks)} blocks are needed, the pool has {runner.num_blocks}")
        random.Random(seed).shuffle(blocks)
        self._tables = [[blocks.pop() for _ in range(count)] for count in counts]

    def read_prompts(self, chunk: int) -> list[Drawn]:
        """Compute the prompts in chunks, one sequence after the other. Returns the token sampled after each prompt."""
        found = []
        for i in range(len(self.tokens)):
            while len(self.tokens[i]) - self._computed[i] > chunk:
                self._runner.launch(Step((self._slice(i, chunk, last=False),))).collect()
                self._computed[i] += chunk
            found += self._step([i])
        return found

    def generate(self, tokens: Mapping[int, int]) -> list[Drawn]:
        for i, token in tokens.items():
            self.tokens[i].append(token)
        return self._step(list(tokens))

    def _step(self, members: Sequence[int]) -> list[Drawn]:
        counts = [len(self.tokens[i]) - self._computed[i] for i in members]
        slices = tuple(self._slice(i, count, last=True) for i, count in zip(members, counts, strict=True))
        drawn = self._runner.launch(Step(slices)).collect()
        for i, count in zip(members, counts, strict=True):
            self._computed[i] += count
        return drawn

    def _slice(self, i: int, count: int, *, last: bool) -> Slice:
        start, split = self._computed[i], self._prompts[i]
        tokens = self.tokens[i]
        draw = Draw(GREEDY, i, len(tokens) - split)
        return Slice(tokens[start : start + count], start, self._tables[i], (draw,) if last else ())


def same_steps(ours: Served, theirs: Served, sizes: Sequence[int], longest: int, slack: float = 1.0) -> Outcome:
    """Compares generation steps of increasing and decreasing sizes, with changing sequences of one pool, so that writes
    of padding rows would be detected. `slack` multiplies the tolerance."""
    source, vocab_size = random.Random(1), ours.shape.vocab_size
    lengths = [source.randint(1, longest) for _ in range(max(sizes))]
    prompts = [random_prompts(1, length, vocab_size, i)[0] for i, length in enumerate(lengths)]
    walks = [Walk(one.runner, prompts, room=2 * len(sizes) + 1) for one in (ours, theirs)]
    pairs = list(zip(*(walk.read_prompts(CHUNK) for walk in walks), strict=True))
    for size in (*sizes, *sizes[::-1]):
        tokens = {i: source.randrange(vocab_size) for i in source.sample(range(len(prompts)), size)}
        pairs += zip(*(walk.generate(tokens) for walk in walks), strict=True)
    return verdict(pairs, slack * TOLERANCES[ours.runner.choices["dtype"]])


def same_loops(ours: Served, theirs: Served, requests: int, longest: int, slack: float = 1.0) -> tuple[Outcome, int]:
    """Compares two engines, each with its own loop. Also returns the number of continuations that diverge, which they
    may at a near-tie; tokens after that are not compared. `slack` multiplies the tolerance."""
    source = random.Random(2)
    prompts = random_prompts(requests, longest, ours.shape.vocab_size, seed=3)
    submits = [(prompt[: source.randint(1, longest)], source.randint(1, longest)) for prompt in prompts]
    cores = [Core(served, GREEDY) for served in (ours, theirs)]
    for core in cores:
        for prompt, max_tokens in submits:
            core.submit(prompt, max_tokens)
        core.finish()
    both = list(zip(*(core.drawn for core in cores), strict=True))
    parted = sum(any(a.token != b.token for a, b in zip(*pair, strict=True)) for pair in both)
    tolerance = slack * TOLERANCES[theirs.runner.choices["dtype"]]
    return verdict((pair for mine, other in both for pair in together(mine, other)), tolerance), parted


def check_overlap(ahead: Served, plain: Served, requests: int, longest: int) -> Outcome:
    found, parted = same_loops(ahead, plain, requests, longest)
    return found._replace(detail=f"{requests} requests, {parted} diverge at a near-tie; {found.detail}")


def check_graphs(graphs: Served, eager: Served, sizes: tuple[int, ...], longest: int) -> Outcome:
    """Compares batches that fit a graph exactly, and padded ones. Fails on a GPU without graphs."""
    if missing := fallbacks(graphs.runner.choices).get("cuda_graphs"):
        return Outcome(False, missing)
    found = same_steps(graphs, eager, sizes, longest)
    batches = ", ".join(map(str, sizes))
    return found._replace(
        detail=f"graphs: {graphs.runner.choices['cuda_graphs']}; batches of {batches}; {found.detail}"
    )


def check_choices(served: Served) -> Outcome:
    choices = served.runner.choices
    missing = fallbacks(choices)
    taken = ", ".join(f"{name} = {choices[name]}" for name in FALLBACKS)
    return Outcome(not missing, "; ".join(missing.values()) or taken)


def fallbacks(choices: Mapping[str, str]) -> dict[str, str]:
    """The fallback and its reason, by choice; empty on a CPU."""
    if choices["device"] == "cpu":
        return {}
    said = {**choices, "attention": f"{choices['attention']}: {choices['attention_reason']}"}
    found = {name: f"{name} = {said[name]}" for name, no in FALLBACKS.items() if said[name].startswith(no)}
    if "decoded" in (matrices := choices.get("matrices", "")):
        found["matrices"] = f"matrices = {matrices}"
    return found


def check_parity(served: Served, device: torch.device, lengths: Sequence[int], steps: int) -> Outcome:
    """Greedy continuations against transformers on the same random weights."""
    prompts = [random_prompts(1, length, served.shape.vocab_size, seed)[0] for seed, length in enumerate(lengths)]
    walk = Walk(served.runner, prompts, steps + 1)
    drawn = [walk.read_prompts(PARITY_CHUNK)]
    for _ in range(steps):
        drawn.append(walk.generate({i: one.token for i, one in enumerate(drawn[-1])}))
    model = twin(served, device)
    rounded = [_logprobs(model, tokens, steps + 1, device) for tokens in walk.tokens]
    model.float()
    exact = [_logprobs(model, tokens, steps + 1, device) for tokens in walk.tokens]
    return parity([[step[i] for step in drawn] for i in range(len(prompts))], rounded, exact)


def parity(ours: list[list[Drawn]], rounded: list[Tensor], exact: list[Tensor]) -> Outcome:
    off, noise, choices = 0.0, 0.0, []
    for drawn, *rows in zip(ours, rounded, exact, strict=True):
        for one, near, right in zip(drawn, *rows, strict=True):
            found = alternatives(one)
            ids = torch.tensor(list(found), device=right.device, dtype=torch.long)
            mine = torch.tensor(list(found.values()), device=right.device)
            off = max(off, _largest(mine - right[ids]))
            noise = max(noise, _largest(near[ids] - right[ids]))
            first, second = right.topk(2).values.tolist()
            choices.append(Choice(first - second, one.token == int(right.argmax())))
    # A sample that failed makes both infinite, and the check fails.
    return judge(choices, off, max(PARITY_SLACK * noise, TOLERANCES["float32"]), f"transformers itself {noise:.2g}, ")


def _largest(differences: Tensor) -> float:
    """The largest absolute difference. Infinite if `differences` is empty, since then nothing was sampled."""
    return float(differences.abs().nan_to_num(nan=torch.inf).max()) if len(differences) else torch.inf


@torch.inference_mode()
def _logprobs(model: Any, tokens: list[int], count: int, device: torch.device) -> Tensor:
    """[count, vocab] float32: after each of the last `count` tokens."""
    logits = model(torch.tensor([tokens], device=device), logits_to_keep=count).logits[0]
    return logits.float().log_softmax(dim=-1)


def blank(path: str, device: torch.device, dtype: torch.dtype) -> Any:
    """transformers' model for a folder's config.json, with the weights that transformers initializes it with."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with device:
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=dtype).eval()


# Not inference mode: outside of it, tensors that were created in it cannot change their dtype.
@torch.no_grad()
def twin(served: Served, device: torch.device) -> Any:
    """transformers' model with the weights of a runner, generated in the same order from the same seed."""
    model = blank(str(served.checkpoint.path), device, served.dtype)
    raw = served.checkpoint.config
    shape = Qwen3.read_config(raw)
    ours = Qwen3(shape, ReferenceAttention(shape.heads), Place(served.dtype, torch.device("meta")))
    theirs = dict(model.named_parameters())
    targets = {name: theirs[name] for name in ours.targets()}
    random_weights(targets, SEED, float(raw.get("initializer_range", 0.02)), lambda *_: None)
    return model
