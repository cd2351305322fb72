"""Drafters that anyone can build: ranks from a model's own replies, a head cut to them, and an A/B that says whether it pays (`bw24-draft`)."""
