"""LoRA adapters (arXiv:2106.09685): from peft's files to low-rank products that are added to linear layers."""
