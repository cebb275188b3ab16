"""The adapter: a module of transformers behind the interface `Model`, tested once when it is loaded."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from engine_worker.attention.backend import AttentionBackend, AttentionInputs, HeadShape
from engine_worker.attention.cache import KVCache
from engine_worker.layers.adapters import StepAdapters
from engine_worker.layers.moe import waits_for_device
from engine_worker.layers.shard import Cut, Place
from engine_worker.models.config import Windows
from engine_worker.models.generic.interface import SERVED, AttentionCall, attention_computed_by, context_of
from engine_worker.models.generic.probe import probe
from engine_worker.models.generic.source import Source, build, load, read_source
from engine_worker.models.model import Embeds, Taps
from sluice.checkpoint.errors import CheckpointError
from sluice.checkpoint.folder import Checkpoint

TOLERANCE = 0.02
"""Largest allowed distance of two hidden states, relative to their norm: far above the noise of bfloat16, far below the
effect of a different token."""
NEAR = 7
"""A small position, other than 0, for `check_independence`."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """A module of transformers, and the attention that it requires."""

    vocab_size: int
    hidden_size: int
    windows: Windows
    heads: HeadShape
    attention: tuple[str, ...]
    """Name of each layer's attention submodule."""
    source: Source = field(repr=False)

    @property
    def num_layers(self) -> int:
        return len(self.windows)


class Adapter:
    """Runs the module's own forward pass on a step's tokens, as a batch of one row, without transformers' KV cache."""

    def __init__(self, config: AdapterConfig, backend: AttentionBackend, place: Place) -> None:
        """Raises ValueError if there is more than one rank."""
        if (ranks := place.shard.size) > 1:
            raise ValueError(
                f"tensor_parallel = {ranks}, but {config.source.name} runs through transformers, on one device"
            )
        self.config = config
        self._backend = backend
        self._dtype = place.dtype
        self._device = place.device
        self._module: Any = None
        self._body: Any = None
        self._head: Any = None
        self._layers: dict[nn.Module, int] = {}
        self.takes_embeds = False

    has_taps = False
    has_axes = False

    @property
    def graphs(self) -> bool:
        # The probe has shown that only experts can read values on the host. It cannot detect host-to-device copies,
        # which a capture refuses too: with these the capture fails.
        sparse = any(hasattr(part, "num_experts") for part in self._module.modules())
        return not sparse or not waits_for_device(self._dtype, self._device)

    @staticmethod
    def read_config(raw: Mapping[str, Any]) -> AdapterConfig:
        source = read_source(raw)
        probed = probe(source)
        return AdapterConfig(
            vocab_size=int(source.config.vocab_size),
            hidden_size=int(source.config.hidden_size),
            windows=probed.windows,
            heads=probed.heads,
            attention=probed.modules,
            source=source,
        )

    def targets(self) -> dict[str, Tensor]:
        """The module's weights. Until they are filled, they contain transformers' random initial values."""
        with torch.inference_mode(False):
            self._module = build(self.config.source, SERVED, self._dtype, self._device).requires_grad_(False)
        return dict(self._module.named_parameters())

    def cuts(self) -> Mapping[str, Cut]:
        return {}

    def load(self, checkpoint: Checkpoint, progress: Callable[[int, int], None]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self._module = load(self.config.source, checkpoint, self._dtype, self._device, progress)

    def freeze(self) -> None:
        module = self._module.eval().requires_grad_(False)
        self._body = module.get_decoder()
        name = next(name for name, part in module.named_modules() if part is self._body)
        self._head = _with_precomputed_body(module, name)
        self._layers = {module.get_submodule(name): layer for layer, name in enumerate(self.config.attention)}
        source = self.config.source
        context, pad = context_of(source.config), getattr(source.config, "pad_token_id", None)
        check_independence(source.name, self._hidden, self.logits, self._whole, context, pad, self._device)
        self.takes_embeds = self._starts_with_embeddings()

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        cache: KVCache,
        inputs: AttentionInputs,
        adapters: StepAdapters | None = None,  # noqa: ARG002 - transformers' modules have no targets
        embeds: Embeds | None = None,
        taps: Taps | None = None,  # noqa: ARG002 - see `has_taps`
    ) -> Tensor:

        def attend(call: AttentionCall) -> Tensor:
            layer = self._layers[call.module]
            query, key, value = (_tokens(part, cache.dtype) for part in (call.query, call.key, call.value))
            size = value.shape[-1]
            # The cache has one head size: values shorter than keys (multi-head latent attention) are padded with zeros.
            value = F.pad(value, (0, key.shape[-1] - size)) if size < key.shape[-1] else value
            out = self._backend.attend(query, key, value, cache.layers[layer], inputs, self.config.windows[layer])
            return out[None, ..., :size].to(call.query.dtype)

        with attention_computed_by(attend):
            return self._hidden(token_ids, positions, embeds)

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits.float()

    def _hidden(self, token_ids: Tensor, positions: Tensor | None, embeds: Embeds | None = None) -> Tensor:
        tokens = {"input_ids": token_ids[None]}
        if embeds is not None:
            x: Tensor = self._body.get_input_embeddings()(token_ids).clone()
            embeds.replace_rows(x)
            tokens = {"inputs_embeds": x[None]}
        position_ids = None if positions is None else positions[None]
        hidden: Tensor = self._body(**tokens, position_ids=position_ids, use_cache=False).last_hidden_state[0]
        return hidden

    def _starts_with_embeddings(self) -> bool:
        """Whether the decoder computes the same from input embeddings as from ids, so that it does not need the ids."""
        ids, positions = torch.tensor((1, 2), device=self._device), torch.tensor((0, 1), device=self._device)
        no_embeds = Embeds(ids[:0], torch.zeros(0, self.config.hidden_size, device=self._device))
        try:
            with attention_computed_by(_within_tokens):
                return _close(self._hidden(ids, positions, no_embeds), self._hidden(ids, positions))
        except Exception:  # noqa: BLE001 - a module that needs ids may raise anything without them
            return False

    def _whole(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        output = self._module(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        logits: Tensor = output.logits[0]
        return logits


def _tokens(heads: Tensor, dtype: torch.dtype) -> Tensor:
    """[1, heads, T, dim] -> [T, heads, dim], contiguous in its last dimension."""
    tokens = heads[0].transpose(0, 1).to(dtype)
    return tokens if tokens.stride(-1) == 1 else tokens.contiguous()


class _Output(BaseModelOutputWithPast):
    """A decoder's output that has only hidden states: every other attribute is None."""

    def __getattr__(self, name: str) -> None:
        return None


class _Precomputed(nn.Module):
    """Stands in for a decoder that has already run: returns its input embeddings as hidden states."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _Output:
        return _Output(last_hidden_state=inputs_embeds)


def _with_precomputed_body(module: nn.Module, path: str) -> nn.Module:
    """A shallow copy of the module whose decoder, at `path`, does nothing: it computes the head, with any scaling and
    capping that the module applies."""
    name, _, rest = path.partition(".")
    copied = copy.copy(module)
    copied._modules = dict(module._modules)
    copied._modules[name] = _with_precomputed_body(module.get_submodule(name), rest) if rest else _Precomputed()
    return copied


def check_independence(
    name: str,
    body: Callable[[Tensor, Tensor | None], Tensor],
    logits: Callable[[Tensor], Tensor],
    whole: Callable[[Tensor, Tensor], Tensor],
    context: int,
    pad: int | None,
    device: torch.device,
) -> None:
    """Check that attention is the only part of the module that mixes tokens. With attention replaced by a function of
    each token alone, a token's hidden state must depend only on its id and its position, counted from 0. The head
    applied to the body's output must equal the output of the whole module.

    body: ids [T], positions [T] (None: the module counts them itself) -> hidden [T, hidden]. logits: hidden ->
    [T, vocab]. whole: ids, positions -> [T, vocab]. context: the model's longest context. pad: an id that modules may
    treat specially, so it is not used. Raises CheckpointError.
    """
    near, far = min(NEAR, context - 1), context - 1
    ids = torch.tensor([number for number in range(4) if number != pad][:3], device=device)
    positions, first_positions = torch.tensor((near, 0, far), device=device), torch.tensor((0, 1), device=device)
    with attention_computed_by(_within_tokens):
        hidden = body(ids[:2], positions[:2])
        swapped = body(ids[[1, 0]], positions[[1, 0]]).flip(0)
        with_another = body(ids[[2, 0]], positions[[2, 0]])[1:]
        if not _close(hidden, swapped) or not _close(hidden[:1], with_another):
            raise CheckpointError(
                f"{name} mixes tokens outside attention (recurrence, convolution), or counts positions itself"
            )
        if not _close(body(ids[:2], first_positions), body(ids[:2], None)):
            raise CheckpointError(f"{name} does not count positions from 0")
        if not _close(logits(hidden), whole(ids[:2], positions[:2])):
            raise CheckpointError(f"{name} computes more than its head after its decoder")


def _within_tokens(call: AttentionCall) -> Tensor:
    """Replaces attention: a function of each token's query, key and value in which a change of any of them shows."""
    heads = call.query.shape[1]
    key, value = (part.repeat_interleave(heads // part.shape[1], dim=1) for part in (call.key, call.value))
    mixed = value + torch.tanh(call.query * key)[..., : value.shape[-1]]
    return mixed.transpose(1, 2).contiguous()


def _close(computed: Tensor, expected: Tensor) -> bool:
    distance = torch.linalg.vector_norm(computed.float() - expected.float(), dim=-1)
    return bool((distance <= TOLERANCE * torch.linalg.vector_norm(expected.float(), dim=-1)).all())
