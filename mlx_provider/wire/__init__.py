"""APIs of other servers: their requests as ours, and our events as their replies."""
