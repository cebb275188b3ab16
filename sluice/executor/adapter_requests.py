"""The adapters that a request uses: LoRA, and prompt tuning."""

from dataclasses import dataclass
from os import fspath

from sluice.executor.errors import check_type


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A LoRA adapter. It is loaded when a request first uses it; without a path it must be on the server already.

    Raises TypeError for a field of the wrong type.
    """

    lora_name: str
    """Id of the adapter on the server. Each name stands for one adapter."""
    lora_int_id: int = 0
    """Must be the same in all requests with this name; otherwise unused, since the name identifies the adapter."""
    lora_path: str = ""
    """Folder as peft saves it, on this machine if the executor started its ring, else on the engines' machines."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "lora_path", fspath(self.lora_path))
        for name, kind in (("lora_name", str), ("lora_int_id", int), ("lora_path", str)):
            check_type(name, getattr(self, name), kind)

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path


@dataclass(frozen=True, slots=True)
class PromptAdapterRequest:
    """A prompt adapter: the trained embeddings of prompt tuning.

    It is loaded when a request first uses it; without a path it must be on the server already. Raises TypeError for a
    field of the wrong type.
    """

    prompt_adapter_name: str
    """Id of the adapter on the server. Each name stands for one adapter."""
    prompt_adapter_id: int = 0
    """Must be the same in all requests with this name; otherwise unused, since the name identifies the adapter."""
    prompt_adapter_local_path: str = ""
    """Folder as peft saves it, on this machine if the executor started its ring, else on the routers' machines."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_adapter_local_path", fspath(self.prompt_adapter_local_path))
        kinds = (("prompt_adapter_name", str), ("prompt_adapter_id", int), ("prompt_adapter_local_path", str))
        for name, kind in kinds:
            check_type(name, getattr(self, name), kind)

    @property
    def adapter_id(self) -> int:
        return self.prompt_adapter_id

    @property
    def name(self) -> str:
        return self.prompt_adapter_name

    @property
    def local_path(self) -> str:
        return self.prompt_adapter_local_path

    @property
    def path(self) -> str:
        return self.prompt_adapter_local_path
