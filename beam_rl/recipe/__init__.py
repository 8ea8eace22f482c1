"""The recipe: typed, validated, read from YAML with `key=value` overrides."""
