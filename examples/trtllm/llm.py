"""`LLM`, the class that TensorRT-LLM and vLLM have too: python llm.py [--model FOLDER]."""

import argparse

from sluice import LLM, SamplingParams

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", help="a checkpoint folder or a Hugging Face id; default: the bundled tiny model")
args = parser.parse_args()

prompts = ["def fibonacci(n):", {"prompt": "class Stack:"}]

with LLM(args.model) as llm:
    for result in llm.generate(prompts, SamplingParams(max_tokens=12, temperature=0), use_tqdm=False):
        print(repr(result.outputs[0].text))
    parts = [part.outputs[0].text_diff for part in llm.generate_async("import os\n", streaming=True)]
    print(len(parts), "parts")
