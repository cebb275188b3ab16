"""Who may connect and call: TLS, bearer tokens, a function of the operator's."""
