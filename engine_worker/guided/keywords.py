"""The structure of JSON schemas."""

from typing import Any

Schema = dict[str, Any]

NAMED_SCHEMAS = frozenset(("properties", "patternProperties", "dependentSchemas", "$defs", "definitions"))
"""Keywords whose values map names to schemas."""
DATA = frozenset(("const", "enum", "default", "examples", "example", "x-guidance"))
"""Keywords whose values contain no schema."""
