"""The board in words and tables: Markdown, CSV, JSON, and what is put into other documents."""
