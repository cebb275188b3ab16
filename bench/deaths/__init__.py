"""A ring whose services die, restart or freeze while streams run: is each stream what it would have been?"""
