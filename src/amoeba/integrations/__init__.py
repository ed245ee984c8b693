"""Hugging Face models: how their experts are stored, recognised, loaded and replaced by ours."""
