"""Access control: TLS, bearer tokens, and the operator's authentication function."""
