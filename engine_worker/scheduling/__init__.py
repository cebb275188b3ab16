"""Who holds memory, and who runs in the next step: two questions, two small interchangeable classes."""
