"""Prompts that look like work: stretches of the Python standard library's source, which the tiny model completes."""

import argparse
import inspect
import subprocess
import typing
from pathlib import Path

from tokenizers import Tokenizer

SOURCES = (argparse, inspect, subprocess, typing)


def python_prompts(model: Path, count: int, tokens: int) -> list[list[int]]:
    """`count` prompts of `tokens` token ids each, all different from their first token block on."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids: list[int] = [i for module in SOURCES for i in tokenizer.encode(inspect.getsource(module)).ids]
    stride = max(1, (len(ids) - tokens) // count)
    return [ids[at : at + tokens] for at in range(0, count * stride, stride)]
