"""Mechanisms that strategies share: streams, pinned memory, byte images, ways into a module. Imports torch.

Nothing here knows a strategy, an option or a rank.
"""
