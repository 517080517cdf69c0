"""Submissions: records without paths and names in a folder that a pull request can add."""
