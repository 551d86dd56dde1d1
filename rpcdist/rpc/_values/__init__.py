"""Python values on the wire; docs/values.md describes the format and its promises."""
