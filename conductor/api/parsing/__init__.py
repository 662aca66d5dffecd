"""Answers of models taken apart: reasoning, text and tool calls, by the form of each model's family."""
