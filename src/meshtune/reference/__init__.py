"""The settings described for people and editors: JSON schema, rows of the reference page, starter files."""
