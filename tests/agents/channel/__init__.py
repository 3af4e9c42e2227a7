"""The control channel: bytes, proofs, and the real server over loopback."""
