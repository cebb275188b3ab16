"""What all topics share: loads, systems in turn, figures, plots, pages, child processes."""
