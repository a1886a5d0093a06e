"""What one part of the daemon or the transport costs."""
