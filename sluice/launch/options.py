"""The names of a ring's options, and where the settings of its services go."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from types import MappingProxyType

from sluice.launch.plan import Plan
from sluice.settings.describe import settings_of
from sluice.settings.keeper import KeeperSettings
from sluice.settings.names import check_options
from sluice.settings.services import DetokenizerSettings, EngineSettings, RouterSettings

RING_OPTIONS = frozenset(field.name for field in fields(Plan)) | {"revision", "on", "start_timeout", "observe"}
"""All options of `Ring`."""
SERVICES = {
    "keeper_args": KeeperSettings,
    "detokenizer_args": DetokenizerSettings,
    "router_args": RouterSettings,
    # The last of them wins if several services have a setting.
    "engine_args": EngineSettings,
}
OTHER_LIBRARIES = {
    **dict.fromkeys(("tensor_parallel_size", "tp_size"), "engine_args={'tensor_parallel': ...}"),
    **dict.fromkeys(("gpu_memory_utilization", "free_gpu_memory_fraction"), "engine_args={'kv_memory_fraction': ...}"),
    "max_num_seqs": "engine_args={'max_batch_size': ...}",
    "max_num_batched_tokens": "engine_args={'max_tokens_per_step': ...}",
    "max_num_tokens": "engine_args={'max_tokens_per_step': ...}",
    "quantization": "engine_args={'quantize': ...}",
}
"""What to write in place of options of vLLM or TensorRT-LLM."""


def check_ring_options(
    given: Iterable[str], known: Collection[str], renamed: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Raises TypeError for a name that is not in `known`, with what to write in its place, such as a setting.

    `renamed`: what to write in place of further names.
    """
    unknown = [name for name in given if name not in known]
    # The settings are only read for an error: describing them parses their sources.
    if unknown:
        settings = {
            name: f"{service}={{{name!r}: ...}}" for service, kind in SERVICES.items() for name in settings_of(kind)
        }
        check_options(unknown, known, {**settings, **OTHER_LIBRARIES, **renamed})
