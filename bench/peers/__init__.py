"""Other systems that `python -m bench peers` compares with, each in a separate environment: see README.md."""
