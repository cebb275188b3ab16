"""LoRA adapters (arXiv:2106.09685): from peft's files to products beside the model's linear maps."""
