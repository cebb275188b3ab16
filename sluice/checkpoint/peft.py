"""The files of an adapter as peft saves them."""

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
"""Weights in the format of older versions, which are not read: a pickle may run code."""
DESCRIPTIONS = frozenset(
    ["task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"]
)
"""Options in the configuration of every kind of adapter that do not change its outputs."""
