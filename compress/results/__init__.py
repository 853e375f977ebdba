"""Every typed result that crosses the border of a room, with one encoder and decoder (`encoding`)."""
