"""One module per topic: the question, how it is measured, and how the answer is shown."""
