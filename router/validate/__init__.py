"""Parse, don't validate: a GenerationSpec message becomes one bounded Spec, or an error that names each bad field."""
