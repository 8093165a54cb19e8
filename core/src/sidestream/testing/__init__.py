"""Test kit: tiny pipelines and models, and checks for strategies. Nothing outside tests imports it."""
