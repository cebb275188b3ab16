"""Access control: TLS, bearer tokens, and an authentication function of the operator's."""
