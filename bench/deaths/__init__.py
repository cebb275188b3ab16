"""Kills, restarts or freezes the services of a ring while streams run, and compares each stream with an undisturbed
run."""
