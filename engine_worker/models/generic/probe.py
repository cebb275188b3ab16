"""What a module asks of attention, found out by running it on the meta device, where nothing is computed."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_worker.attention.backend import HeadShape
from engine_worker.models.generic.counts import Counts
from engine_worker.models.generic.interface import PROBED, Call, answered_by, seen_by
from engine_worker.models.generic.source import Source, build
from engine_worker.models.windows import Windows
from sluice.ring.checkpoint import CheckpointError

TOKENS = 23
"""A number that no module has of heads or experts."""
META = torch.device("meta")
UNDERSTOOD = frozenset(
    {"dropout", "is_causal", "output_attentions", "position_ids", "scaling", "sliding_window", "use_cache"}
)
"""Options of attention that say nothing more than its mask and positions do, and the scale of its scores."""


@dataclass(frozen=True, slots=True)
class Probed:
    """The attention layers of a module, in the order in which they are called."""

    modules: tuple[str, ...]
    """Their names in it."""
    heads: HeadShape
    windows: Windows


def probe(source: Source) -> Probed:
    """Raises CheckpointError where the module does something that the paged cache cannot serve."""
    # The choices of experts are data, which this device has not; batched products do not look at them.
    config = copy.deepcopy(source.config)
    config._experts_implementation = "batched_mm"
    calls: list[Call] = []
    counts = Counts(TOKENS)

    def record(call: Call) -> Tensor:
        calls.append(call)
        value = call.value.repeat_interleave(call.query.shape[1] // call.value.shape[1], dim=1)
        return value.transpose(1, 2).contiguous()

    ids = torch.zeros(1, TOKENS, dtype=torch.int64, device=META)
    try:
        module = build(Source(source.module_class, config), PROBED, torch.bfloat16, META).eval()
        with answered_by(record), torch.inference_mode(), counts:
            found = module.get_decoder()(
                input_ids=ids, position_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False
            )
    except Exception as error:
        raise CheckpointError(
            f"{source.name} does not run on tokens of many sequences side by side, or not without looking at values: "
            f"{type(error).__name__}: {error}"
        ) from error
    names = {part: name for name, part in module.named_modules()}
    modules = tuple(names[call.module] for call in calls)
    _check_layers(source, modules)
    probed = Probed(modules, _heads(source, calls), tuple(_window(source, call) for call in calls))
    # Rows of a step are of many sequences: a count of them says nothing of a token.
    if counts.reach(found.last_hidden_state, *(part for call in calls for part in (call.query, call.key, call.value))):
        raise CheckpointError(f"{source.name} counts the tokens of a step itself")
    return probed


def _check_layers(source: Source, modules: tuple[str, ...]) -> None:
    layers = int(source.config.num_hidden_layers)
    if len(modules) != layers or len(set(modules)) != layers:
        raise CheckpointError(
            f"{source.name} has {layers} layers, and asks for attention {len(modules)} times in "
            f"{len(set(modules))} of them: every layer has to ask once"
        )


def _heads(source: Source, calls: Iterable[Call]) -> HeadShape:
    found = {_shape(source, call) for call in calls}
    if len(found) > 1:
        shapes = ", ".join(sorted(map(str, found)))
        raise CheckpointError(f"{source.name} has layers with different heads: {shapes}")
    return found.pop()


def _shape(source: Source, call: Call) -> HeadShape:
    _, num_heads, queries, head_dim = call.query.shape
    _, num_kv_heads, keys, value_dim = call.value.shape
    if (queries, keys) != (TOKENS, TOKENS) or call.key.shape != (1, num_kv_heads, keys, head_dim):
        raise CheckpointError(
            f"{source.name} attends with queries {list(call.query.shape)}, keys {list(call.key.shape)} and values "
            f"{list(call.value.shape)}"
        )
    if num_heads % num_kv_heads or value_dim > head_dim:
        raise CheckpointError(
            f"{source.name} has {num_heads} heads of {head_dim} over {num_kv_heads} KV heads of {value_dim}"
        )
    scale = call.options.get("scaling")
    return HeadShape(num_heads, num_kv_heads, head_dim, None if scale is None else float(scale))


def _window(source: Source, call: Call) -> int | None:
    odd = sorted(
        name
        for name, value in call.options.items()
        if name not in UNDERSTOOD and value is not None and value is not False
    )
    if odd:
        raise CheckpointError(f"{source.name} passes {', '.join(odd)} to attention, which is not supported")
    if call.mask is not None:
        seen = seen_by(call.mask)
        if isinstance(seen, str):
            raise CheckpointError(f"{source.name} attends through {seen}")
        return seen
    if call.options.get("sliding_window") is not None:
        raise CheckpointError(f"{source.name} asks for a sliding window without a mask that shows it")
    causal = call.options.get("is_causal")
    if not (getattr(call.module, "is_causal", True) if causal is None else causal):
        raise CheckpointError(f"{source.name} attends to what comes after a token")
    return None
