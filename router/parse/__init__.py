"""Parse, don't validate: turns a GenerationSpec message into a Spec with all fields in range, or into an error that
names every invalid field."""
