"""A user's own images and annotations, in whatever layout, brought into the one we read."""
