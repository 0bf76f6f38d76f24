"""Conversations through an engine whose memory experts and KV share."""
