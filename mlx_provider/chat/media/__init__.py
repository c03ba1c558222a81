"""Images and videos: fetched, bounded, decoded as small as the model takes them."""
