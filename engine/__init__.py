"""The model, its paged KV cache and the step that runs them. No network in here."""
