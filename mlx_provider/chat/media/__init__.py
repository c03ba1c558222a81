"""Images and videos: fetched, limited, and decoded at the size that the model needs."""
