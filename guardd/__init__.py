"""guardd: one shared guard in front of every tool call of an AI agent."""

__version__ = "0.1.0"
