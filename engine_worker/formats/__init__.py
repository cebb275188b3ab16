"""How checkpoints store a quantized matrix. Readers of public formats all end in one representation, `Stored`."""
