"""Messages between client and engine process."""
