"""Makes a checkpoint folder from a GGUF file, whose weights remain in the file."""
