"""The keeper: hands the KV blocks of a machine's engines to engines on other machines, from memory and from disk."""
