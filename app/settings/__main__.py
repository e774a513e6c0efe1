"""Prints the table of settings that stands in README: ``python -m app.settings``."""

from .schema import markdown_table

if __name__ == "__main__":
    print(markdown_table())
