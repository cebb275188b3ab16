"""Other systems beside which `python -m bench peers` measures, each in an environment of its own: see README.md."""
