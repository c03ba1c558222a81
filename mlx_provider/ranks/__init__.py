"""One model over several machines: a group of ranks, of which rank 0 leads.

Rank 0 talks HTTP, schedules and decides; it tells each decision to the followers, which run the
same engine on what they hear. Tensors go by MLX's collectives, decisions by the `channel`.
"""
